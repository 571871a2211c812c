"""Tests of `runner/drafts/heads`."""
