"""Tests of the models that draft."""
