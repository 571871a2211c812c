"""The choice of the adapter of a layer cache, and lists of adapters. Scenarios: docs/internals/cache.md, 8."""

import pytest

from runner.cache.layers import distrust, flatten
from runner.cache.layers.kv import ExactKVState, KVState, PlainKVState
from runner.cache.layers.snapshot import complete
from runner.cache.layers.states import GenericState, RecurrentState
from runner.cache.layers.window import ChunkState, WindowState
from runner.cache.sequence import SequenceLayers
from runner.cache.sketch import LayerFacts
from runner.kv_bits.hadamard import HadamardKVCache

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache  # isort: skip

from tests.lib import layer_caches
from tests.lib.layer_caches import Unknown, adapted, held, kept, layer, taken, write


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
    # It keeps its first tokens for good: what it holds is no range of tokens.
    assert isinstance(adapted(RotatingKVCache(8, 2)), GenericState)


def test_a_class_names_its_adapter_for_itself_alone() -> None:
    class Derived(HadamardKVCache): ...

    assert isinstance(adapted(Derived(32, 8)), GenericState)


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


def test_layer_caches_come_in_the_order_of_the_model_once_without_gaps() -> None:  # scenario 47
    a, b, c, d = KVCache(), ArraysCache(1), RotatingKVCache(4), KVCache()
    assert list(flatten([CacheList(a, b), None, c, CacheList(CacheList(d), a)])) == [a, b, c, d]


def test_a_reset_copies_out_every_kind_of_layer() -> None:  # scenario 31
    kinds = layer_caches.KINDS.values()
    sequence = SequenceLayers(LayerFacts(lambda: [make() for make in kinds], frozenset(range(len(kinds)))))
    sequence.page_out()
    for state in sequence.states:
        layer_caches.append(vars(state)["layer"], layer_caches.positions(0, 6))
    sequence.count_forward(6)
    sequence.evaluate()
    snapshots = [taken(state) for state in sequence.states]
    sequence.reset()
    assert sequence.nbytes == 0
    assert [kept(snapshot) for snapshot in snapshots] == [list(range(6))] * len(layer_caches.KINDS)
    assert sequence.totals.ledger.count == len(layer_caches.KINDS)
    assert sequence.totals.ledger.nbytes == sum(snapshot.nbytes for snapshot in snapshots) > 0
    for state, snapshot in zip(sequence.states, snapshots, strict=True):
        state.restore([snapshot])
    assert sequence.totals.ledger.nbytes == sum(snapshot.nbytes for snapshot in snapshots)
    assert [snapshot.live for snapshot in snapshots] == [kind not in layer_caches.TAILS for kind in layer_caches.KINDS]
    assert [held(state) for state in sequence.states] == [list(range(6))] * len(layer_caches.KINDS)
