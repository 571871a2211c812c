"""Tools for users and developers: what the executables of scripts/ run, and libraries that tests use as well."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The repository."""
