"""Tests of the package `scripts.tools.real`."""
