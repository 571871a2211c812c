"""What assistants are given in the recording, from numpy alone."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.tools.models.assistants import BACKBONE

RECORDED = Path(__file__).parent / "recorded.safetensors"
PLACES = 23
"""Tokens that the target has seen."""
SLIDING = 9
"""Those that are left of them in its window."""
STEPS = 3
"""Drafts, each from the hidden state of the one before it."""

Array = NDArray[np.float32]


def rows() -> Array:
    """The row of the token before each draft, scaled: [STEPS, D]."""
    return np.random.default_rng(11).standard_normal((STEPS, BACKBONE)).astype(np.float32)


def hidden() -> Array:
    """The hidden state before the first of them, [D]."""
    return np.random.default_rng(12).standard_normal(BACKBONE).astype(np.float32)


def shared() -> dict[str, tuple[Array, Array]]:
    """Keys and values by kind of layer, [1, heads, tokens, width]."""
    numbers = np.random.default_rng(13)

    def some(tokens: int, width: int) -> Array:
        return numbers.standard_normal((1, 2, tokens, width)).astype(np.float32)

    return {
        "sliding_attention": (some(SLIDING, 16), some(SLIDING, 16)),
        "full_attention": (some(PLACES, 32), some(PLACES, 32)),
    }
