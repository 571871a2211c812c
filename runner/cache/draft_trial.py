"""Tries whether a model may draft: whether several tokens in one forward get the logits that they get one by one, and
whether its layers go back behind those that are right.

Some models see more of the tokens in one forward than they would one by one (phi3small, whose mask shows in every other
layer what follows a token; plamo3, whose mask shows a token more than its window keeps), and layers of unknown classes
cannot go back.
"""

from collections.abc import Generator

import mlx.core as mx

from runner.cache.layers.difference import difference
from runner.cache.layers.trial import SLICE_TOKENS, Forward, MakeLayers, Trial, most, verdict
from runner.cache.sequence import SequenceLayers

_PROMPT = 43
"""Tokens before the rounds: not a multiple of what chunks, blocks or pools of keys may count by."""
_COUNT, _RIGHT = 5, 2
_ROUNDS = 2
"""The rounds of so many tokens, of which as many are right. Both are compared, and so is what follows each."""


class DraftTrial(Trial):
    """Finds out, one slice at a time, whether a model may draft.

    On a CPU a large model takes seconds for all of it: prompts of 86 tokens, two rounds of 5 tokens, up to two more of
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
    count = _PROMPT + _ROUNDS * _COUNT
    # From all over the vocabulary, whose first tokens are often special ones.
    tokens = [i * vocab_size // count for i in range(count)]
    tokens = [tokens[i * 17 % count] for i in range(count)]
    ours, alone = _Line(make_layers, forward), _Line(make_layers, forward)
    for start in range(0, _PROMPT, SLICE_TOKENS):
        for line in (ours, alone):
            line.read(tokens[start : min(_PROMPT, start + SLICE_TOKENS)])
            yield
    sequence, at = ours.sequence, _PROMPT
    if not sequence.markable:
        return f"there is no way back in {', '.join(sorted(_unmarkable(sequence)))}"
    together: list[float] = []
    behind: list[float] = []
    for _ in range(_ROUNDS):
        right = []
        for token in tokens[at : at + _COUNT]:
            right.append(alone.read([token]))
            yield
        mark = sequence.mark(_COUNT)
        logits = ours.read(tokens[at : at + _COUNT])
        yield
        together += [difference(mine[None], theirs) for mine, theirs in zip(logits, right, strict=True)]
        sequence.revert(mark, at + _RIGHT)
        if sequence.position == at:  # some of the layers can only go back to the mark
            ours.read(tokens[at : at + _RIGHT])
            yield
        for place in range(_RIGHT, _COUNT):
            behind.append(difference(ours.read([tokens[at + place]]), right[place]))
            yield
        at += _COUNT
    return verdict(max(most(together), most(behind)), ours.layers)


def _unmarkable(sequence: SequenceLayers) -> set[str]:
    """Returns the names of the classes of layers that cannot go back."""
    return {type(getattr(state, "layer", state)).__name__ for _, state in sequence.used if not state.markable}
