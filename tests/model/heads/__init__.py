"""Tests of `runner/model/heads`."""
