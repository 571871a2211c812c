"""Tests of models of mlx-vlm, beside mlx-vlm itself: `scripts/test --vlm`."""
