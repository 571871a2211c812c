"""An experiment with a model, one slice at a time, which finds out what the model allows."""

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import mlx.core as mx

from runner.cache.layers import adapt, flatten
from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.layers.difference import difference
from runner.cache.layers.generic import gather
from runner.cache.layers.snapshot import Ledger
from runner.cache.sequence import SequenceLayers

MakeLayers = Callable[[], list[object]]
Forward = Callable[[mx.array, list[object]], mx.array]

SLICE_TOKENS = 16  # the most that an answer waits for beside a prompt, too
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""The largest accepted difference between the logits of several rows at once and those of single rows, in relation to
their spread, in most of the rows that are compared.

Other numbers of rows have other kernels, which round differently. Measured over all architectures (tiny ones with
random weights, which amplify rounding), rounding alone costs 0.0007 in the median architecture and up to 0.009 in nine
of ten for float16, 0.027 and 0.13 for bfloat16; other kernels change a part of that. float32 may have the 10 bits of
float16 on GPUs. Single steps are off by up to 1.6, where two experts are nearly tied, so one step alone does not count.
"""


class Trial:
    """Computes the slices of an experiment until it shows a fault, or none. Owner: the engine thread."""

    def __init__(self, slices: Generator[None, None, str]) -> None:
        """`slices` yields after each slice, and returns the fault."""
        self.fault: str | None = None
        """The reason why the model does not allow what is tried, for the log; empty if it does, None while unknown."""
        self._slices = slices

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


def most(off: list[float]) -> float:
    """Returns the lower of the medians of some differences: single ones do not count."""
    return sorted(off)[(len(off) - 1) // 2]


def verdict(off: float, layers: list[object]) -> str:
    """Returns the fault of a trial whose logits are off by so much, over these layers; empty if it is rounding."""
    coarse = any(array.dtype == mx.bfloat16 for array in gather(layers, set()))
    return "" if off <= (_LIMIT_BFLOAT16 if coarse else _LIMIT) else f"the logits of a trial are off by {off:.2f}"


# --- Tries whether a model gives the rows of a batch the logits that each row gets alone. mlx-lm's batch caches
# count the positions in an array, one for each row, and hide the padding of shorter rows behind a mask. Attention
# that is written out by hand may not know such a mask (gemma2, phi3small), a model may want one position for all
# rows (gpt_bigcode), or compute positions by itself (afm7, silently wrong).

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
        super().__init__(_batch_slices(make_layers, forward, vocab_size))


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


def _batch_slices(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> Generator[None, None, str]:
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


# --- Tries whether a model may draft: whether several tokens in one forward get the logits that they get one by
# one, and whether its layers go back behind those that are right. Some models see more of the tokens in one forward
# than they would one by one (phi3small, whose mask shows in every other layer what follows a token; plamo3, whose
# mask shows a token more than its window keeps), and layers of unknown classes cannot go back.

_PLACES = (3, 43)
"""Where the rounds begin, in tokens: what a model sees too much of is most beside little else, or beside a window that
is full. Neither is a multiple of what chunks, blocks or pools of keys may count by."""

_COUNT, _RIGHT = 5, 2
"""The tokens of a round, and those of them that are right."""

_LIMIT_DRAFTS = 1e-3
"""The largest accepted difference that other drafts behind them make to the logits of the right tokens, in relation to
their spread. The kernels are the same, so nothing is rounded otherwise: it is 0 in all architectures but phi3small."""


class DraftTrial(Trial):
    """Finds out, one slice at a time, whether a model may draft.

    On a CPU a large model takes seconds for all of it: prompts of 76 tokens, four rounds of 5 tokens, up to two more of
    2, and 16 forwards of a single token. A slice is one forward, of at most 16 tokens. Owner: the engine thread.
    """

    def __init__(self, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> None:
        """`forward` takes token ids [1, L] and a cache list to logits [1, L, V]; an error that it raises is a fault."""
        super().__init__(_draft_slices(make_layers, forward, vocab_size))


class _Line:
    """A sequence that reads tokens as a session does."""

    def __init__(self, make_layers: MakeLayers, forward: Forward) -> None:
        self.layers = make_layers()
        self.sequence = SequenceLayers(self.layers)
        self._forward = forward

    def read(self, tokens: list[int]) -> mx.array:
        """Returns the logits [L, V] of a forward, evaluated."""
        logits = self._forward(mx.array([tokens]), self.layers)[0]
        mx.eval(logits, self.sequence.arrays())
        self.sequence.advance(len(tokens))
        return logits


def _draft_slices(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> Generator[None, None, str]:
    """Yields between slices; returns the fault."""
    count = _PLACES[-1] + _COUNT
    # From all over the vocabulary, whose first tokens are often special ones.
    tokens = [i * 17 % count * vocab_size // count for i in range(count)]
    ours, alone = _Line(make_layers, forward), _Line(make_layers, forward)
    off = moved = 0.0
    for place in _PLACES:
        for line in (ours, alone):
            while (at := line.sequence.position) < place:
                line.read(tokens[at : min(at + SLICE_TOKENS, place)])
                yield
        if not ours.sequence.markable:
            return f"there is no way back in {', '.join(sorted(_unmarkable(ours.sequence)))}"
        right = []
        for token in tokens[place : place + _COUNT]:
            right.append(alone.read([token]))
            yield
        wrong = [(token + vocab_size // 2) % vocab_size for token in tokens[place + _RIGHT : place + _COUNT]]
        found = yield from _round(ours, tokens[place : place + _COUNT], wrong, right)
        off = max(off, most(found.together), most(found.behind))
        moved = max(moved, most(found.moved))
    if moved > _LIMIT_DRAFTS:
        return f"drafts change the logits before them by {moved:.2g}"
    return verdict(off, ours.layers)


class _Found(NamedTuple):
    """Differences between logits, one for each row that was compared."""

    together: list[float]
    """Of a round from single tokens."""
    moved: list[float]
    """Of the right tokens from themselves, with other drafts behind them."""
    behind: list[float]
    """Of what follows a round from single tokens."""


def _round(line: _Line, tokens: list[int], wrong: list[int], right: list[mx.array]) -> Generator[None, None, _Found]:
    """Reads a round, goes back to where it began, reads it again with wrong drafts, goes back behind what is right, and
    reads on one by one. `right` are the logits of single tokens. Yields after each forward."""
    sequence, at = line.sequence, line.sequence.position
    mark = sequence.mark(_COUNT)
    logits = line.read(tokens)
    together = [difference(ours[None], theirs) for ours, theirs in zip(logits, right, strict=True)]
    yield
    sequence.revert(mark, at)
    mark = sequence.mark(_COUNT)
    with mark.watched():
        again = line.read([*tokens[:_RIGHT], *wrong])
    moved = [difference(again[row][None], logits[row][None]) for row in range(_RIGHT)]
    yield
    sequence.revert(mark, at + _RIGHT)
    if sequence.position == at:  # a layer can only go back to the mark
        line.read(tokens[:_RIGHT])
        yield
    behind = []
    for token, theirs in zip(tokens[_RIGHT:], right[_RIGHT:], strict=True):
        behind.append(difference(line.read([token]), theirs))
        yield
    return _Found(together, moved, behind)


def _unmarkable(sequence: SequenceLayers) -> set[str]:
    """Returns the names of the classes of layers that cannot go back."""
    return {type(getattr(state, "layer", state)).__name__ for _, state in sequence.used if not state.markable}
