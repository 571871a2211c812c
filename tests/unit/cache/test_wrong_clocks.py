"""A layer does not hold what the facts say: its session ends, and later ones keep it whole. Answers are never wrong.

The layers are mlx-lm's own, and their entries name the tokens they are of. The second one skips every token from the
twentieth on, so that up to there nothing can be seen.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from runner.cache import CACHE_KINDS, PrefixCache, make_cache
from runner.cache.checkpoints import CheckpointPolicy
from runner.cache.session import Session
from runner.cache.sketch import LayerFacts
from runner.cache.trie_cache import TrieCache
from runner.numbers.cache import describe_cache

from mlx_lm.models.cache import KVCache  # isort: skip


IN_STEP = 20


class Clocks:
    """Sessions over such layers."""

    def __init__(self, cache: PrefixCache | None = None) -> None:
        self.cache = cache or TrieCache(LayerFacts(lambda: [KVCache(), KVCache()], frozenset(range(2))))

    def begin(self, prompt: Sequence[int]) -> Session:
        session = self.cache.begin(prompt)
        self.check(session)
        return session

    def read(self, session: Session, to: int) -> None:
        """One forward up to so many tokens."""
        at = session.position
        with session.forward(to - at):
            for layer, end in zip(session.layers, (to, min(to, IN_STEP)), strict=True):
                assert isinstance(layer, KVCache)
                if end > at:
                    entries = mx.array(session.recorded[at:end], mx.float32)[None, None, :, None]
                    layer.update_and_fetch(entries, entries)
        self.check(session)

    def close(self, session: Session) -> None:
        session.close()
        self.check_kept()

    def check(self, session: Session) -> None:
        """The layers hold what they would if no other session had ever been."""
        for layer, end in zip(session.layers, (session.position, min(session.position, IN_STEP)), strict=True):
            assert isinstance(layer, KVCache)
            held = [] if layer.keys is None else layer.keys[0, 0, : layer.offset, 0].tolist()
            assert held == session.recorded[:end]
        self.check_kept()

    def check_kept(self) -> None:
        cache = self.cache
        if not isinstance(cache, TrieCache):
            return
        held = [slot for node in cache.trie.nodes() for slot in node.slots if slot is not None]
        assert len(held) == cache.sequences.totals.ledger.count
        sequences = {
            cache.sequences.kept,
            *cache.sequences.parked,
            *(session.sequence for session in cache.sequences.sharing),
        }
        assert {slot for slot in held if slot.live} == {each for sequence in sequences for each in sequence.live()}


PROMPT = list(range(1, 16))


@pytest.mark.parametrize("who", [0, 1])
def test_its_session_ends_and_later_ones_keep_the_layer_whole(who: int) -> None:
    """Two are on their way and one is kept; they had a common beginning in step."""
    clocks = Clocks()
    first = clocks.begin([*PROMPT, *range(100, 120)])
    clocks.read(first, 15)
    second, third = clocks.begin([*PROMPT, *range(200, 220)]), clocks.begin([*PROMPT, *range(300, 320)])
    clocks.read(second, 12)
    clocks.read(third, 18)
    clocks.close(third)
    finder, other = ((first, second), (second, first))[who]
    with pytest.raises(RuntimeError, match="layer 1 is at 20 after 25 tokens"):
        clocks.read(finder, 25)
    clocks.close(finder)
    assert describe_cache(clocks.cache).counts.nodes == 0
    clocks.read(other, 18)
    with pytest.raises(RuntimeError, match="layer 1 is at"):
        clocks.read(other, 30)
    clocks.close(other)

    fourth = clocks.begin([*PROMPT, *range(300, 320)])
    assert fourth.cached == 0
    for to in (15, 30, 34):
        clocks.read(fourth, to)
    clocks.close(fourth)
    assert clocks.begin([*PROMPT, *range(300, 319), 7]).cached == 34


def test_a_session_that_was_detached_before_it_finds_out_spares_the_next_one() -> None:
    clocks = Clocks()
    found = clocks.begin([*PROMPT, *range(100, 120)])
    clocks.read(found, 15)
    clocks.cache.detach()
    with pytest.raises(RuntimeError, match="layer 1 is at 20 after 25 tokens"):
        clocks.read(found, 25)
    clocks.close(found)
    clocks.read(again := clocks.begin([*PROMPT, *range(100, 120)]), 25)
    clocks.close(again)


def test_states_that_a_correction_brought_are_evicted() -> None:
    cache = TrieCache(LayerFacts(lambda: [KVCache(), KVCache()], frozenset(range(2))), policy=CheckpointPolicy())
    clocks = Clocks(cache)
    with pytest.raises(RuntimeError, match="layer 1 is at 20 after 25 tokens"):
        clocks.read(found := clocks.begin([*PROMPT, *range(100, 120)]), 25)
    clocks.close(found)
    session = clocks.begin(range(600))
    while step := session.next_forward(600):
        clocks.read(session, session.position + step)
    clocks.close(session)
    assert cache.paged_bytes > 0
    cache.bound(cache.nbytes - cache.paged_bytes)
    assert cache.paged_bytes == 0


@pytest.mark.parametrize(
    ("kind", "used", "to", "message"),
    [
        *((kind, {0, 1}, 25, "layer 1 is at 20 after 25 tokens") for kind in ("single", "none")),
        *((kind, {0}, 5, "layer 1 is at 5 after 5 tokens") for kind in CACHE_KINDS),
    ],
)
def test_later_sessions_have_new_layers_whichever_cache_it_is(kind: str, used: set[int], to: int, message: str) -> None:
    """Also for a layer that fills though the model does not use it."""
    facts = LayerFacts(lambda: [KVCache(), KVCache()], frozenset(used))
    clocks = Clocks(make_cache(kind, facts))
    with pytest.raises(RuntimeError, match=message):
        clocks.read(first := clocks.begin([*PROMPT, *range(100, 120)]), to)
    first.close()
    again = clocks.begin([*PROMPT, *range(100, 120)])
    clocks.read(again, 25)
    assert again.position == 25
    again.close()
    clocks.check_kept()
