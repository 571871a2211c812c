"""Checks on a lent device. Read `__main__` first."""
