"""Tests of `runner/drafts/dflash`."""
