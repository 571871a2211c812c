"""Real tiny models: what a batch says is what its rows say alone, whoever joins and leaves, and what a row takes home
is what it would have there.
"""

from random import Random

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.layers.snapshot import LayerSnapshot, Owned
from runner.cache.sequence import SequenceLayers
from scripts.tools.models.tiny import KINDS, VOCAB, WINDOW, Tiny, tiny, words
from tests.lib.driver import largest

BATCHABLE = tuple(kind for kind in KINDS if kind not in ("quantized", "llama4", "deepseek_v41"))
LENGTHS = (2, 7, 30, 31, 32, 33, 40, 63, 64, 70)
assert WINDOW == 32
every_kind = pytest.mark.parametrize("kind", BATCHABLE)


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


def contents(sequence: SequenceLayers) -> list[mx.array]:
    """Returns the content of the layers, as the trie would store it."""
    arrays: list[mx.array] = []
    for _, state in sequence.used:
        snapshot: Snapshot | None = state.snapshot(0, sequence.offset)
        assert isinstance(snapshot, LayerSnapshot)
        owned: Owned[object] = snapshot.copied()
        arrays += owned.arrays
        snapshot.close()
    return arrays


@every_kind
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_says_what_its_rows_say_alone(kind: str, seed: int) -> None:
    model = tiny(kind)
    assert batchable(SequenceLayers(model.make_layers()).states)
    journey(model, Random(seed), rounds=8)


@every_kind
def test_rows_around_the_edge_of_a_window_decode_together(kind: str) -> None:
    """All of them at once, long enough for the short ones to wrap, too."""
    model = tiny(kind)
    rows = [Row(model, words(length, seed=length), 100) for length in (5, 31, 32, 33, 63, 64)]
    batch = BatchedLayers([row.sequence.layers for row in rows[:3]])
    batch.extend([row.sequence.layers for row in rows[3:]])
    for _ in range(30):
        step(model, batch, rows)
    for index, row in enumerate(rows):
        row.absorb(batch, index)
        row.go_on()
        row.go_on()


@every_kind
def test_what_a_row_takes_home_is_what_the_trie_may_keep(kind: str) -> None:
    """Its snapshots hold what those of a run alone hold."""
    model = tiny(kind)
    rows = [Row(model, words(length, seed=length), 16) for length in (40, 9, 30)]
    batch = BatchedLayers([row.sequence.layers for row in rows])
    for _ in range(5):
        step(model, batch, rows)
    for index, row in enumerate(rows):
        row.absorb(batch, index)
        ours, right = contents(row.sequence), contents(row.oracle)
        assert len(ours) == len(right) > 0
        for mine, theirs in zip(ours, right, strict=True):
            assert mine.shape == theirs.shape
            assert largest(mine - theirs) <= model.tolerance
        assert row.sequence.ledger.count == 0


@every_kind
def test_a_batch_leaves_the_layers_of_its_rows_alone(kind: str) -> None:
    """Bit by bit, so that a row whose batch failed can go on from where it joined."""
    model = tiny(kind)
    rows = [Row(model, words(length, seed=length), 100) for length in (33, 6, 20)]
    before = [[mx.array(x) for x in row.sequence.arrays()] for row in rows]
    mx.eval(before)
    batch = BatchedLayers([rows[0].sequence.layers])
    batch.extend([row.sequence.layers for row in rows[1:]])
    for _ in range(3):
        step(model, batch, rows)
    batch.keep([0, 2])
    step(model, batch, [rows[0], rows[2]])
    for row, arrays in zip(rows, before, strict=True):
        assert row.sequence.offset == row.sequence.position
        assert all(mx.array_equal(x, y) for x, y in zip(row.sequence.arrays(), arrays, strict=True))


@every_kind
def test_the_kinds_are_sensitive_to_what_a_batch_may_get_wrong(kind: str) -> None:
    """The control: another first token of a short prompt changes the logits by far more than the tolerance."""
    model = tiny(kind)
    one, other = ([first, *words(5)] for first in (3, VOCAB - 5))
    logits = [Row(model, prompt, 100).expected for prompt in (one, other)]
    assert largest(logits[0] - logits[1]) > 100 * model.tolerance
