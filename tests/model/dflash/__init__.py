"""Tests of `runner/model/dflash`."""
