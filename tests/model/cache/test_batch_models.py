"""Real tiny models: what a batch says is what its rows say alone, whoever joins and leaves, and what a row takes home
is what it would have there.
"""

from random import Random

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.sequence import SequenceLayers
from scripts.tools.models.tiny import KINDS, WINDOW, Tiny, tiny, words
from tests.lib.driver import largest

BATCHABLE = tuple(kind for kind in KINDS if kind not in ("quantized", "llama4", "deepseek_v41"))
LENGTHS = (2, 7, 30, 31, 32, 33, 40, 63, 64, 70)
assert WINDOW == 32


class Row:
    """A request that decodes greedily in a batch or alone, beside an oracle that never leaves its own layers."""

    def __init__(self, tiny: Tiny, prompt: list[int], chunk: int) -> None:
        self.tiny = tiny
        self.sequence = SequenceLayers(tiny.make_layers())
        self.oracle = SequenceLayers(tiny.make_layers())
        self.waiting = 0
        """The number of tokens that only a batch has seen."""
        for at in range(0, len(prompt), chunk):
            part = mx.array([prompt[at : at + chunk]])
            self.expected = self._forward(self.oracle, part)
            assert largest(self._forward(self.sequence, part) - self.expected) == 0

    def next(self) -> mx.array:
        """The token to go on with, [1, 1], after which the oracle has gone on, too."""
        token = mx.argmax(self.expected)[None, None]
        self.expected = self._forward(self.oracle, token)
        return token

    def go_on(self) -> None:
        """A step alone."""
        self.check(self._forward(self.sequence, self.next()))

    def check(self, logits: mx.array) -> None:
        """[VOCAB]; within the tolerance, which is far below what another token would change."""
        distance = largest(logits - self.expected)
        assert distance <= self.tiny.tolerance, f"logits differ by {distance:.2g} after {self.oracle.position} tokens"

    def absorb(self, batch: BatchedLayers, index: int) -> None:
        if self.waiting:
            self.sequence.page_out()
            self.sequence.absorb(batch.batch_caches(), index, self.waiting)
            self.sequence.advance(self.waiting)
            self.sequence.evaluate()
        self.waiting = 0
        assert self.sequence.position == self.oracle.position
        assert {state.offset for _, state in self.sequence.used} == {self.oracle.position}

    def _forward(self, sequence: SequenceLayers, tokens: mx.array) -> mx.array:
        sequence.page_out()
        logits = self.tiny.model(tokens, cache=sequence.layers)[0, -1]
        sequence.advance(tokens.shape[1])
        mx.eval([logits, *sequence.arrays()])
        return logits


def step(tiny: Tiny, batch: BatchedLayers, rows: list[Row]) -> None:
    """A forward over one token of each row."""
    tokens = mx.concatenate([row.next() for row in rows])
    logits = tiny.model(tokens, cache=batch.layers)[:, -1]
    mx.eval([logits, *batch.arrays()])
    for row, ours in zip(rows, logits, strict=True):
        row.check(ours)
        row.waiting += 1


def journey(tiny: Tiny, random: Random, rounds: int) -> None:
    """Rows join a batch, leave it, go on alone and join again; each says what it says alone."""
    batch: BatchedLayers | None = None
    inside: list[Row] = []
    outside: list[Row] = []
    for _ in range(rounds):
        if not inside or (len(inside) < 5 and random.random() < 0.6):
            prompt = words(random.choice(LENGTHS), seed=random.randrange(1000))
            coming = [Row(tiny, prompt, random.choice((1, 9, 100)) if len(prompt) < 10 else random.choice((16, 100)))]
            if outside:
                coming.insert(0, outside.pop())
            if batch is None:
                batch = BatchedLayers([row.layers for row in map(_sequence, coming)])
            else:
                batch.extend([row.layers for row in map(_sequence, coming)])
            inside += coming
        assert batch is not None
        for _ in range(random.choice((1, 2, 4))):
            step(tiny, batch, inside)
        if random.random() < 0.5:
            staying = [index for index in range(len(inside)) if random.random() < 0.6]
            for index in sorted(set(range(len(inside))) - set(staying)):
                row = inside[index]
                row.absorb(batch, index)
                for _ in range(random.choice((1, 3))):
                    row.go_on()
                outside.append(row)
            inside = [inside[index] for index in staying]
            if inside:
                batch.keep(staying)
            else:
                batch = None


def _sequence(row: Row) -> SequenceLayers:
    return row.sequence


@pytest.mark.parametrize(("seed", "kind"), [*enumerate(BATCHABLE)], ids=BATCHABLE)
def test_a_batch_says_what_its_rows_say_alone(seed: int, kind: str) -> None:
    model = tiny(kind)
    assert batchable(SequenceLayers(model.make_layers()).states)
    journey(model, Random(seed), rounds=8)
