"""Whether a model gives the rows of a batch what it gives each of them alone: found by trying.

mlx-lm's batch caches count the positions in an array, one for each row, and hide what pads the shorter rows behind a
mask. Attention that is written out by hand may not know such a mask (gemma2, phi3small), a model may want one position
for all (gpt_bigcode), or work out positions by itself (afm7, silently wrong).
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
"""Tokens of the prompts. Much padding for few tokens: the more there is, the more a wrong mask or position changes."""

_STEPS = 4
_SLICE_TOKENS = 16  # what an answer waits for at most beside a prompt, too
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""How far the logits may lie from the single ones, as a part of their own spread, in most steps of every row.

Other batch sizes have other kernels, which round otherwise. Measured over all architectures, tiny ones with random
weights that amplify it, all rounding together costs 0.0007 in the median one and up to 0.009 in nine of ten for
float16, 0.027 and 0.13 for bfloat16; other kernels change a part of that. float32 may have the 10 bits of float16 on
GPUs. Single steps are off by up to 1.6, where an expert is chosen by a hair, so one alone does not count.

Without the padding in its mask the median architecture is off by 0.55, and nine of ten by more than 0.1; one position
for all rows costs more. What changes less than the limit, in a model that hardly looks at its past, goes unseen."""


class BatchTrial:
    """Finds out whether rows that join and leave a batch get the logits that they get alone, one slice at a time.

    A large model on a CPU takes seconds for all of it: 75 tokens of prompts, 9 forwards of a single token, and 4 of one
    token for two or three rows. A slice is one forward, of at most 16 tokens. Owner: the engine thread.
    """

    def __init__(self, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> None:
        """`forward` takes token ids [B, L] and a cache list to logits [B, L, V]; whatever it raises is a fault, too."""
        self.fault: str | None = None
        """Why rows cannot be computed together, a short sentence for the log; empty if they can, None while unknown."""
        self._slices = _slices(make_layers, forward, vocab_size)

    def advance(self) -> None:
        """One slice, until the fault is known. Never raises."""
        if self.fault is not None:
            return
        try:
            next(self._slices)
        except StopIteration as end:
            self.fault = end.value
        except Exception as error:  # whatever a model makes of what it does not expect
            self.fault = first_line(error)
        if self.fault is not None:  # only now: the error held what was made
            self._slices.close()
            mx.clear_cache()  # nothing stays of it


def first_line(error: Exception) -> str:
    """Of what it says, for the log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class _Row:
    """A prompt, to be read alone, and what is to follow."""

    def __init__(self, layers: list[object], tokens: list[int], length: int, forward: Forward) -> None:
        self.layers = layers
        self.following = tokens[length:]
        self.off: list[float] = []
        """How far the logits of the batch lay from those of the row alone, step by step."""
        self._prompt = tokens[:length]
        self._forward = forward

    def read(self) -> Iterator[None]:
        """The prompt, slice by slice."""
        for start in range(0, len(self._prompt), _SLICE_TOKENS):
            mx.eval(self._forward(mx.array([self._prompt[start : start + _SLICE_TOKENS]]), self.layers))
            yield

    def compare(self, token: mx.array, ours: mx.array) -> None:
        """The logits [1, V] that a batch gave for `token` [1, 1], with those that the row gives alone."""
        self.off.append(difference(ours, self._forward(token, self.layers)[0]))


def _slices(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> Generator[None, None, str]:
    """Yields between two slices; returns the fault."""
    unknown = {type(leaf).__name__ for leaf in flatten(make_layers()) if not batchable([adapt(leaf, Ledger())])}
    if unknown:
        return f"mlx-lm has no batch of {', '.join(sorted(unknown))}"
    lengths = (_SHORT, _LONG, _LATE)
    rows = []
    for place, length in enumerate(lengths):
        count = length + _STEPS
        # From everywhere in the vocabulary, others for each row: its first tokens are often special ones.
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
