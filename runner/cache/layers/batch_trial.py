"""Tries whether a model gives the rows of a batch the logits that each row gets alone.

mlx-lm's batch caches count the positions in an array, one for each row, and hide the padding of shorter rows behind a
mask. Attention that is written out by hand may not know such a mask (gemma2, phi3small), a model may want one position
for all rows (gpt_bigcode), or compute positions by itself (afm7, silently wrong).
"""

from collections.abc import Callable, Generator, Iterator

import mlx.core as mx

from runner.cache.layers import adapt, flatten
from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.layers.difference import difference
from runner.cache.layers.generic import gather
from runner.cache.layers.snapshot import Ledger

MakeLayers = Callable[[], list[object]]
Forward = Callable[[mx.array, list[object]], mx.array]

_SHORT, _LONG, _LATE = 3, 48, 24
"""Lengths of the prompts, in tokens. Much padding for few tokens: the more there is, the more a wrong mask or position
changes."""

_STEPS = 4
_SLICE_TOKENS = 16  # the most that an answer waits for beside a prompt, too
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""The largest accepted difference between the logits of a batch and those of single rows, in relation to their spread,
in most steps of every row.

Other batch sizes have other kernels, which round differently. Measured over all architectures (tiny ones with random
weights, which amplify rounding), rounding alone costs 0.0007 in the median architecture and up to 0.009 in nine of ten
for float16, 0.027 and 0.13 for bfloat16; other kernels change a part of that. float32 may have the 10 bits of float16
on GPUs. Single steps are off by up to 1.6, where two experts are nearly tied, so one step alone does not count.

Without the padding in its mask the median architecture is off by 0.55, and nine of ten by more than 0.1; one position
for all rows costs more. A model that hardly looks at its past may change less than the limit, and goes unnoticed.
"""


class BatchTrial:
    """Finds out, one slice at a time, whether rows that join and leave a batch get the logits that they get alone.

    On a CPU a large model takes seconds for all of it: 75 tokens of prompts, 9 forwards of a single token, and 4 of one
    token for two or three rows. A slice is one forward, of at most 16 tokens. Owner: the engine thread.
    """

    def __init__(self, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> None:
        """`forward` takes token ids [B, L] and a cache list to logits [B, L, V]; an error that it raises is a fault."""
        self.fault: str | None = None
        """The reason why rows cannot be computed together, for the log; empty if they can, None while unknown."""
        self._slices = _slices(make_layers, forward, vocab_size)

    def advance(self) -> None:
        """Computes one slice, until the fault is known. Never raises."""
        if self.fault is not None:
            return
        try:
            next(self._slices)
        except StopIteration as end:
            self.fault = end.value
        except Exception as error:  # models raise anything when given what they do not expect
            self.fault = first_line(error)
        if self.fault is not None:  # only now: the error held the trial's arrays
            self._slices.close()
            mx.clear_cache()  # the trial leaves nothing behind


def first_line(error: Exception) -> str:
    """Returns the first line of an error, for the log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
        for start in range(0, len(self._prompt), _SLICE_TOKENS):
            mx.eval(self._forward(mx.array([self._prompt[start : start + _SLICE_TOKENS]]), self.layers))
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
    off = max(sorted(row.off)[(len(row.off) - 1) // 2] for row in rows)  # the lower of the medians
    coarse = any(array.dtype == mx.bfloat16 for array in gather(short.layers, set()))
    return "" if off <= (_LIMIT_BFLOAT16 if coarse else _LIMIT) else f"the logits of a trial are off by {off:.2f}"
