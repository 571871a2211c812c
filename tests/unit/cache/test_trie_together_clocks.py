"""A layer whose clock is found to be wrong in one session while others are open: all stacks know of it at once.

The layers are mlx-lm's own, and their entries name the tokens they are of. The second one skips every token from the
twentieth on, so that up to there nothing can be seen.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layers.states import GenericState
from runner.cache.session import TrieSession
from runner.cache.trie_cache import TrieCache

from mlx_lm.models.cache import KVCache  # isort: skip


IN_STEP = 20


class Clocks:
    """Sessions over such layers."""

    def __init__(self) -> None:
        self.cache = TrieCache(lambda: [KVCache(), KVCache()])

    def begin(self, prompt: Sequence[int]) -> TrieSession:
        session = self.cache.begin(prompt)
        assert isinstance(session, TrieSession)
        self.check(session)
        return session

    def read(self, session: TrieSession, to: int) -> None:
        """One forward up to so many tokens."""
        at = session.position
        with session.forward(to - at):
            for layer, end in zip(session.layers, (to, min(to, IN_STEP)), strict=True):
                assert isinstance(layer, KVCache)
                if end > at:
                    entries = mx.array(session.recorded[at:end], mx.float32)[None, None, :, None]
                    layer.update_and_fetch(entries, entries)
        self.check(session)

    def close(self, session: TrieSession) -> None:
        session.close()
        self.check_kept()

    def check(self, session: TrieSession) -> None:
        """The layers hold what they would if no other session had ever been."""
        for layer, end in zip(session.layers, (session.position, min(session.position, IN_STEP)), strict=True):
            assert isinstance(layer, KVCache)
            held = [] if layer.keys is None else layer.keys[0, 0, : layer.offset, 0].tolist()
            assert held == session.recorded[:end]
        self.check_kept()

    def check_kept(self) -> None:
        cache = self.cache
        held = [slot for node in cache.trie.nodes() for slot in node.slots if slot is not None]
        assert len(held) == cache.sequences.facts.ledger.count
        sequences = {
            cache.sequences.kept,
            *cache.sequences.parked,
            *(session.sequence for session in cache.sequences.sharing),
        }
        assert {slot for slot in held if slot.live} == {each for sequence in sequences for each in sequence.live()}

    @property
    def known(self) -> list[bool]:
        """Tells of each sequence if its second layer has the generic adapter."""
        sequences = self.cache.sequences
        among = [sequences.kept, *sequences.parked, *(session.sequence for session in sequences.sessions)]
        return [type(sequence.states[1]) is GenericState for sequence in among]


PROMPT = list(range(1, 16))


@pytest.mark.parametrize("who", [0, 1])
def test_every_sequence_knows_at_once(who: int) -> None:
    """Two are on their way and one is kept; they had a common beginning in step."""
    clocks = Clocks()
    first = clocks.begin([*PROMPT, *range(100, 120)])
    clocks.read(first, 15)
    second, third = clocks.begin([*PROMPT, *range(200, 220)]), clocks.begin([*PROMPT, *range(300, 320)])
    clocks.read(second, 12)
    clocks.read(third, 18)
    clocks.close(third)
    assert clocks.known == [False, False, False]
    finder, other = ((first, second), (second, first))[who]
    clocks.read(finder, 25)
    assert clocks.known == [True, True, True]
    clocks.read(other, 16)
    clocks.read(other, 30)
    clocks.read(finder, 35)
    fourth = clocks.begin([*PROMPT, *range(300, 320)])
    assert fourth.cached == 18, "where the kept stack stands"
    clocks.read(fourth, 30)
    fifth = clocks.begin([*PROMPT, *range(100, 130)])
    assert (fifth.cached, clocks.known[-1]) == (0, True)
    for session in (finder, other, fourth):
        clocks.close(session)
    assert clocks.begin([*fourth.recorded[:30], 7]).cached == 30


def test_snapshots_of_a_layer_whose_clock_was_wrong_are_not_used() -> None:
    """In a node that another session is on, too; its own layers go on from there."""
    clocks = Clocks()
    first = clocks.begin([*PROMPT, 1])
    clocks.read(first, 15)
    clocks.close(first)
    second, third = clocks.begin([*PROMPT, *range(200, 220)]), clocks.begin([*PROMPT, *range(300, 320)])
    assert [session.cached for session in (second, third)] == [15, 15]
    clocks.read(third, 25)
    assert all(node.slots[1] is None for node in clocks.cache.trie.nodes())
    assert clocks.begin([*PROMPT, 5]).cached == 0
    clocks.read(second, 25)
    clocks.close(second)
    clocks.close(third)
    assert clocks.begin([*PROMPT, *range(300, 320)]).cached == 25
