"""Tests of `runner/model/assistant`."""
