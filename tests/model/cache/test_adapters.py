"""The choice of the adapter of a layer cache, lists of adapters, and models that are restored from snapshots.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layer_interface import LayerState, Snapshot
from runner.cache.layers import adapt, distrust, flatten
from runner.cache.layers.chunk import ChunkState
from runner.cache.layers.generic import GenericState
from runner.cache.layers.kv import ExactKVState, KVState, PlainKVState
from runner.cache.layers.recurrent import RecurrentState
from runner.cache.layers.snapshot import Ledger, complete
from runner.cache.layers.window import WindowState
from runner.cache.sequence import SequenceLayers

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache  # isort: skip

from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from tests.lib import layer_caches
from tests.lib.driver import forwards_at_once, largest
from tests.lib.layer_caches import Unknown, adapted, held, kept, layer, taken, write

PROMPT = [(i * i + 3 * i) % VOCAB for i in range(60)]
FOREIGN = [(7 * i) % VOCAB for i in range(30)]


# --- the table


def test_the_table_goes_by_the_exact_class() -> None:
    found = {kind: type(adapted(make())) for kind, make in layer_caches.KINDS.items()}
    assert found == {
        "plain": PlainKVState,
        "quantized": KVState,
        "exact": ExactKVState,
        "window": WindowState,
        "chunk": ChunkState,
        "arrays": RecurrentState,
        "generic": GenericState,
    }
    assert issubclass(Unknown, KVCache)


@pytest.mark.parametrize("said", [0, 3])
@pytest.mark.parametrize("count", [5, 8, 20])
def test_a_window_that_keeps_its_first_tokens_is_kept_whole(count: int, said: int) -> None:
    """Its content is no range of tokens, so only the generic adapter is right."""
    state = adapted(RotatingKVCache(8, 2))
    assert isinstance(state, GenericState)
    assert isinstance(adapted(RotatingKVCache(8, 0)), WindowState)
    write(state, count)
    write(state, said, at_once=False)
    there = held(state)
    snapshot = taken(state)
    write(state, 11, at_once=False, first=500)
    state.restore([snapshot])
    assert (state.offset, held(state)) == (count + said, there)
    write(state, 2, at_once=False)
    stop = count + said
    assert sorted(held(state)) == [0, 1, *range(max(2, stop - 4), stop + 2)]


def test_a_layer_that_speaks_the_interface_is_its_own_adapter() -> None:
    state = layer("plain")
    assert adapt(state, Ledger()) is state


@pytest.mark.parametrize("kind", layer_caches.KINDS)
def test_an_untrusted_layer_keeps_its_object_and_resets_to_its_fresh_state(kind: str) -> None:
    state = layer(kind)
    fresh = vars(adapted(layer_caches.KINDS[kind]()))["fresh"]
    write(state, 10)
    generic = distrust(state, 20)
    assert isinstance(generic, GenericState)
    assert (generic.layer, generic.offset) == (vars(state)["layer"], 20)
    assert not generic.can_rewind(10)
    snapshot = taken(generic)
    complete(generic.page_out())
    generic.reset()
    assert vars(vars(state)["layer"]) == fresh
    generic.restore([snapshot])
    assert generic.offset == 20


# --- lists of layers


def test_layer_caches_come_in_the_order_of_the_model_once_without_gaps() -> None:  # scenario 47
    a, b, c, d = KVCache(), ArraysCache(1), RotatingKVCache(4), KVCache()
    assert list(flatten([CacheList(a, b), None, c, CacheList(CacheList(d), a)])) == [a, b, c, d]


def test_a_reset_keeps_every_object() -> None:  # scenario 47
    inner, outer = KVCache(), ArraysCache(2)
    pair = CacheList(outer, inner)
    sequence = SequenceLayers([pair])
    _write(sequence, 5)
    assert sequence.offset == 5
    sequence.reset()
    assert sequence.layers == [pair]
    assert (pair[0], pair[1]) == (outer, inner)
    assert (inner.offset, inner.keys, outer[0], sequence.offset, sequence.nbytes) == (0, None, None, 0, 0)


def test_a_reset_copies_out_every_kind_of_layer() -> None:  # scenario 31
    sequence = SequenceLayers([make() for make in layer_caches.KINDS.values()])
    _write(sequence, 6)
    snapshots = [taken(state) for state in sequence.states]
    sequence.reset()
    assert sequence.nbytes == 0
    assert [kept(snapshot) for snapshot in snapshots] == [list(range(6))] * len(layer_caches.KINDS)
    assert sequence.ledger.count == len(layer_caches.KINDS)
    assert sequence.ledger.nbytes == sum(snapshot.nbytes for snapshot in snapshots) > 0
    for state, snapshot in zip(sequence.states, snapshots, strict=True):
        state.restore([snapshot])
    assert sequence.ledger.nbytes == sum(snapshot.nbytes for snapshot in snapshots)
    assert [snapshot.live for snapshot in snapshots] == [kind not in layer_caches.TAILS for kind in layer_caches.KINDS]
    assert [held(state) for state in sequence.states] == [list(range(6))] * len(layer_caches.KINDS)


def test_a_rewind_copies_out_the_states_and_leaves_the_slices() -> None:
    sequence = SequenceLayers([layer_caches.KINDS["window"](), layer_caches.KINDS["plain"]()])
    _write(sequence, 6)
    window, slices = (taken(state) for state in sequence.states)
    assert not sequence.rewind(6)
    assert window.live
    assert not sequence.rewind(4)
    assert (window.live, slices.live) == (False, True)
    assert [held(state) for state in sequence.states] == [list(range(4))] * 2
    assert kept(window) == list(range(6))


# --- whole models


class Run:
    """A model over its layers, forward by forward."""

    def __init__(self, model: Tiny, generic: bool = False) -> None:
        self.model = model
        self.sequence = SequenceLayers(model.make_layers())
        if generic:
            self.sequence.states = [
                GenericState(layer_cache, self.sequence.ledger) for layer_cache in flatten(self.sequence.layers)
            ]

    def forward(self, tokens: list[int]) -> mx.array:
        self.sequence.page_out()
        logits = self.model.model(mx.array([tokens]), cache=self.sequence.layers)[0, -1]
        self.sequence.advance(len(tokens))
        mx.eval([logits, *self.sequence.arrays()])
        return logits

    def snapshots(self, start: int) -> list[Snapshot]:
        """One of each layer that has something."""
        return [taken(state, start, self.sequence.offset) for _, state in self.sequence.used]


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_model_goes_on_where_it_was(kind: str, generic: bool) -> None:  # scenarios 46 and 48
    """41 tokens, a snapshot, 30 foreign tokens, back: bit-equal to a run with the same forwards (a window that is read
    token by token comes back in another order of its sums, so the first forward after the restore is a chunk). Only a
    chunk comes back without the tokens that are hidden from attention, whose zeros change the order of the sums."""
    model = tiny(kind)
    run = Run(model, generic)
    oracle = forwards_at_once(model, PROMPT, [20, 20, 1, 19])[-1]
    run.forward(PROMPT[:20])
    run.forward(PROMPT[20:40])
    run.forward(PROMPT[40:41])
    snapshots = run.snapshots(0)
    for foreign in (FOREIGN, FOREIGN[:3]):
        run.sequence.reset()
        assert not any(snapshot.live for snapshot in snapshots)
        run.forward(foreign)
        for (_, state), snapshot in zip(run.sequence.used, snapshots, strict=True):
            if state.sliceable:
                state.rewind(0)
            complete(state.page_out())
            state.restore([snapshot])
            assert state.offset == 41
        run.sequence.position = 41
        ours = run.forward(PROMPT[41:])
        if kind == "llama4" and not generic:
            assert largest(ours - oracle) <= model.tolerance
        else:
            assert mx.array_equal(ours, oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_do_not_change_what_a_model_says(kind: str) -> None:  # scenario 44
    """One after every forward; each then leads to the same logits as the first time."""
    model = tiny(kind)
    lengths = [17, 20, 1, 1, 2, 19]
    oracle = forwards_at_once(model, PROMPT, lengths)
    run = Run(model)
    at, taken_at = 0, {}
    for length, logits in zip(lengths, oracle, strict=True):
        assert mx.array_equal(run.forward(PROMPT[at : at + length]), logits)
        taken_at[at + length] = run.snapshots(at)
        at += length
    for place in (4, 1):  # a chunk of 19 after 41 tokens, a token after 37
        stop = sum(lengths[: place + 1])
        run.sequence.reset()
        for index, (_, state) in enumerate(run.sequence.used):
            state.restore([pieces[index] for end, pieces in taken_at.items() if end <= stop])
        run.sequence.position = stop
        ours = run.forward(PROMPT[stop : stop + lengths[place + 1]])
        assert largest(ours - oracle[place + 1]) <= model.tolerance


def _write(sequence: SequenceLayers, count: int) -> None:
    """A forward over tokens that carry their positions."""
    sequence.page_out()
    for state in sequence.states:
        _append(state, count)
    sequence.advance(count)
    sequence.evaluate()


def _append(state: LayerState, count: int) -> None:
    layer_caches.append(vars(state)["layer"], layer_caches.positions(state.offset, count))
