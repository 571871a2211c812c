"""Tries whether a model may draft: whether several tokens in one forward get the logits that they get one by one, and
whether its layers go back behind those that are right.

Some models see more of the tokens in one forward than they would one by one (phi3small, whose mask shows in every other
layer what follows a token; plamo3, whose mask shows a token more than its window keeps), and layers of unknown classes
cannot go back.
"""

from collections.abc import Generator
from typing import NamedTuple

import mlx.core as mx

from runner.cache.layers.difference import difference
from runner.cache.layers.trial import SLICE_TOKENS, Forward, MakeLayers, Trial, most, verdict
from runner.cache.sequence import SequenceLayers

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
        super().__init__(_slices(make_layers, forward, vocab_size))


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


def _slices(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> Generator[None, None, str]:
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
