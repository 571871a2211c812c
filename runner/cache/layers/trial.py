"""Whether a model gives the rows of a batch what it gives each of them alone: found by trying.

mlx-lm's batch caches count the positions in an array, one for each row, and hide what pads the shorter rows behind a
mask. Attention that is written out by hand may not know such a mask (gemma2, phi3small), a model may want one position
for all (gpt_bigcode), or work out positions by itself (afm7, silently wrong).
"""

from collections.abc import Callable

import mlx.core as mx

from runner.cache.layers import adapt, flatten
from runner.cache.layers.batch import Batch, batchable
from runner.cache.layers.difference import difference
from runner.cache.layers.generic import gather
from runner.cache.layers.snapshot import Ledger

MakeLayers = Callable[[], list[object]]
Forward = Callable[[mx.array, list[object]], mx.array]

_SHORT, _LONG, _LATE = 3, 48, 24
"""Tokens of the prompts. Much padding for few tokens: the more there is, the more a wrong mask or position changes."""

_STEPS = 4
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""How far the logits may lie from the single ones, as a part of their own spread, in most steps of every row.

Other batch sizes have other kernels, which round otherwise. Measured over all architectures, tiny ones with random
weights that amplify it, all rounding together costs 0.0007 in the median one and up to 0.009 in nine of ten for
float16, 0.027 and 0.13 for bfloat16; other kernels change a part of that. float32 may have the 10 bits of float16 on
GPUs. Single steps are off by up to 1.6, where an expert is chosen by a hair, so one alone does not count.

Without the padding in its mask the median architecture is off by 0.55, and nine of ten by more than 0.1; one position
for all rows costs more. What changes less than the limit, in a model that hardly looks at its past, goes unseen."""


def find_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Empty if rows that join and leave a batch get the logits that they get alone, else a short sentence for the log.

    `forward` takes token ids [B, L] and a cache list to logits [B, L, V]; whatever it raises is a fault, too. Costs 3
    forwards of up to 48 tokens, 9 of a single one, and 4 of one token for two or three rows. Owner: the engine thread.
    """
    unknown = {type(leaf).__name__ for leaf in flatten(make_layers()) if not batchable([adapt(leaf, Ledger())])}
    if unknown:
        return f"mlx-lm has no batch of {', '.join(sorted(unknown))}"
    try:
        return _try(make_layers, forward, vocab_size)
    except Exception as error:  # whatever a model makes of what it does not expect
        return first_line(error)
    finally:
        mx.clear_cache()  # nothing stays of it


def first_line(error: Exception) -> str:
    """Of what it says, for the log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class _Row:
    """A prompt, read alone, and what is to follow."""

    def __init__(self, layers: list[object], tokens: list[int], length: int, forward: Forward) -> None:
        self.layers = layers
        self.following = tokens[length:]
        self.off: list[float] = []
        """How far the logits of the batch lay from those of the row alone, step by step."""
        mx.eval(forward(mx.array([tokens[:length]]), layers))


def _try(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    lengths = (_SHORT, _LONG, _LATE)
    rows = []
    for place, length in enumerate(lengths):
        count = length + _STEPS
        # From everywhere in the vocabulary, others for each row: its first tokens are often special ones.
        tokens = [(i * len(lengths) + place) * vocab_size // (count * len(lengths)) for i in range(count)]
        rows.append(_Row(make_layers(), tokens, length, forward))

    def step(*among: _Row) -> None:
        tokens = [mx.array([[row.following.pop()]]) for row in among]
        logits = forward(mx.concatenate(tokens), batch.layers)
        for row, token, ours in zip(among, tokens, logits, strict=True):
            row.off.append(difference(ours, forward(token, row.layers)[0]))

    short, long, late = rows
    batch = Batch([short.layers, long.layers])
    step(short, long)
    batch.extend([late.layers])
    step(short, long, late)
    batch.keep([0, 2])
    for _ in range(_STEPS - 2):
        step(short, late)
    off = max(sorted(row.off)[(len(row.off) - 1) // 2] for row in rows)  # the lower of the medians
    coarse = any(array.dtype == mx.bfloat16 for array in gather(short.layers, set()))
    return "" if off <= (_LIMIT_BFLOAT16 if coarse else _LIMIT) else f"the logits of a trial are off by {off:.2f}"
