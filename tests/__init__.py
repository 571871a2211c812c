"""Tests by tier: see tests/README.md."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""
