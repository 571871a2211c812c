"""Tests of `runner/drafts/assistant`."""
