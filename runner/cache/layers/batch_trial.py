"""Tries whether a model gives the rows of a batch the logits that each row gets alone.

mlx-lm's batch caches count the positions in an array, one for each row, and hide the padding of shorter rows behind a
mask. Attention that is written out by hand may not know such a mask (gemma2, phi3small), a model may want one position
for all rows (gpt_bigcode), or compute positions by itself (afm7, silently wrong).
"""

from collections.abc import Generator, Iterator

import mlx.core as mx

from runner.cache.layers import adapt, flatten
from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.layers.difference import difference
from runner.cache.layers.snapshot import Ledger
from runner.cache.layers.trial import SLICE_TOKENS, Forward, MakeLayers, Trial, most, verdict

_SHORT, _LONG, _LATE = 3, 48, 24
"""Lengths of the prompts, in tokens. Much padding for few tokens: the more there is, the more a wrong mask or position
changes."""

_STEPS = 4
"""The steps of a row at most. Differences count against the limit of `trial.py`.

Without the padding in its mask the median architecture is off by 0.55, and nine of ten by more than 0.1; one position
for all rows costs more. A model that hardly looks at its past may change less than the limit, and goes unnoticed.
"""


class BatchTrial(Trial):
    """Finds out, one slice at a time, whether rows that join and leave a batch get the logits that they get alone.

    On a CPU a large model takes seconds for all of it: 75 tokens of prompts, 9 forwards of a single token, and 4 of one
    token for two or three rows. A slice is one forward, of at most 16 tokens. Owner: the engine thread.
    """

    def __init__(self, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> None:
        """`forward` takes token ids [B, L] and a cache list to logits [B, L, V]; an error that it raises is a fault."""
        super().__init__(_slices(make_layers, forward, vocab_size))


class _Row:
    """A prompt that is read alone, and the tokens that follow it."""

    def __init__(self, layers: list[object], tokens: list[int], length: int, forward: Forward) -> None:
        self.layers = layers
        self.following = tokens[length:]
        self.off: list[float] = []
        """The differences between the logits of the batch and of the row alone, one for each step."""
        self._prompt = tokens[:length]
        self._forward = forward

    def read(self) -> Iterator[None]:
        """Reads the prompt slice by slice."""
        for start in range(0, len(self._prompt), SLICE_TOKENS):
            mx.eval(self._forward(mx.array([self._prompt[start : start + SLICE_TOKENS]]), self.layers))
            yield

    def compare(self, token: mx.array, ours: mx.array) -> None:
        """Compares the logits [1, V] that a batch gave for `token` [1, 1] with those that the row gives alone."""
        self.off.append(difference(ours, self._forward(token, self.layers)[0]))


def _slices(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> Generator[None, None, str]:
    """Yields between slices; returns the fault."""
    unknown = {type(layer).__name__ for layer in flatten(make_layers()) if not batchable([adapt(layer, Ledger())])}
    if unknown:
        return f"mlx-lm has no batch of {', '.join(sorted(unknown))}"
    lengths = (_SHORT, _LONG, _LATE)
    rows = []
    for place, length in enumerate(lengths):
        count = length + _STEPS
        # From all over the vocabulary, whose first tokens are often special ones; different for each row.
        tokens = [(i * len(lengths) + place) * vocab_size // (count * len(lengths)) for i in range(count)]
        rows.append(_Row(make_layers(), tokens, length, forward))
        yield from rows[-1].read()

    def step(*among: _Row) -> Iterator[None]:
        tokens = [mx.array([[row.following.pop()]]) for row in among]
        logits = forward(mx.concatenate(tokens), batch.layers)
        mx.eval(logits)
        yield
        for row, token, ours in zip(among, tokens, logits, strict=True):
            row.compare(token, ours)
            yield

    short, long, late = rows
    batch = BatchedLayers([short.layers, long.layers])
    yield from step(short, long)
    batch.extend([late.layers])
    yield from step(short, long, late)
    batch.keep([0, 2])
    for _ in range(_STEPS - 2):
        yield from step(short, late)
    return verdict(max(most(row.off) for row in rows), short.layers)
