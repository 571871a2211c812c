"""Sessions of real tiny models that decode in a batch for a while, and are the same afterwards as without it.

The tokens are given, not sampled. Every story is told twice, once with all forwards alone; layers, records, trie and
what follows are compared. The two differ by rounding at most.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.checkpoints import CheckpointPolicy
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.batched import staying
from runner.cache.layers.snapshot import LayerSnapshot
from runner.cache.node import spelled
from runner.cache.session import DecodeRows, TrieSession
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import VOCAB, Tiny, tiny, words
from tests.lib.driver import ask, ask_uncached, check_equal, check_trie, largest

BATCHABLE = ("llama", "gemma3", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "deepseek_v32")
every_kind = pytest.mark.parametrize("kind", BATCHABLE)

# Short and long ones, before and after a window of 32 is full; the last two share half of their prompts.
PROMPTS = ([*words(41), 5], words(20, seed=2), [*words(50, seed=3), 9, 8, 7], [*words(50, seed=3), 1, 2])


def token(place: int, step: int) -> int:
    """Returns the token that a session samples at a step."""
    return (11 * step + 5 * place + step * step) % VOCAB


class Sessions:
    """Sessions of a model that have read their prompts, over one cache; alone, or joined in rows."""

    def __init__(
        self, model: Tiny, prompts: Sequence[list[int]] = PROMPTS, *, together: bool = True, drafted: bool = False
    ) -> None:
        """What rows say is `drafted` in rounds, of which each row has other tokens right."""
        self.model = model
        self.drafted = drafted
        self.cache = TrieCache(model.facts, policy=CheckpointPolicy(gap=3, first_distance=16))
        self.together = together
        self.sessions: list[TrieSession] = []
        self.rows: list[DecodeRows] = []
        self.said: list[int] = []
        self.logits: list[list[mx.array]] = []
        for prompt in prompts:
            self.begin(prompt)

    def begin(self, prompt: list[int]) -> None:
        session = self.cache.begin(prompt)
        assert isinstance(session, TrieSession)
        read(self.model, session)
        self.sessions.append(session)
        self.rows.append(DecodeRows(session))
        self.said.append(0)
        self.logits.append([])

    def join(self, *places: int) -> None:
        """The first one's row takes in the others."""
        if self.together:
            self.rows[places[0]].join([self.rows[place] for place in places[1:]])
            for place in places[1:]:
                self.rows[place] = self.rows[places[0]]

    def leave(self, place: int, settle: bool = True) -> None:
        """Removes a row as `Batch.leave` does: the session takes its row home, and so does the last one left."""
        rows = self.rows[place]
        if len(rows.sessions) == 1:
            return
        leaving = rows.sessions.index(self.sessions[place])
        stay = staying(len(rows.sessions), {leaving})
        if settle:
            rows.settle(leaving)
        if len(stay) == 1:
            rows.settle(stay[0])
        rows.keep(stay)
        self.rows[place] = DecodeRows(self.sessions[place])

    def say(self, *places: int, steps: int = 1) -> None:
        """A token of each of these, who are all that are in their rows."""
        until = {place: self.said[place] + steps for place in places}
        while left := [place for place in places if self.said[place] < until[place]]:
            for rows in dict.fromkeys(self.rows[place] for place in left):
                if self.drafted and len(rows.sessions) > 1:
                    self._round(rows, until)
                else:
                    self._forward(rows)

    def close(self, *places: int) -> None:
        for place in places:
            self.leave(place)
            self.sessions[place].close()

    def cached(self, prompt: list[int]) -> int:
        """Returns the number of tokens of a prompt that the cache holds."""
        session = self.cache.begin(prompt)
        session.close()
        return session.cached

    def check_answer(self, prompt: list[int]) -> int:
        """Serves a prompt and compares the answer with one without a cache. Returns the number of cached tokens."""
        answer = ask(self.model, self.cache, prompt, say=3)
        check_equal(self.model, answer, ask_uncached(self.model, prompt, say=3))
        return answer.session.cached

    def _model_forward(self, tokens: mx.array, layers: list[object]) -> mx.array:
        return self.model.model(tokens, cache=layers)

    def _forward(self, rows: DecodeRows) -> None:
        among = self._among(rows)
        before = rows.lengths
        logits = rows.compute(
            self._model_forward, mx.array([token(place, self.said[place]) for place in among])[:, None]
        )
        mx.eval(logits, rows.arrays())
        assert rows.lengths == [length + 1 for length in before]
        for row, place in enumerate(among):
            self._record(place, logits[row])

    def _round(self, rows: DecodeRows, until: dict[int, int]) -> None:
        """A forward over five tokens of each row, of which some say less."""
        among, before = self._among(rows), rows.lengths
        coming = [[token(place, self.said[place] + at) for at in range(5)] for place in among]
        right = [min(1 + (self.said[place] + 2 * place) % 5, until[place] - self.said[place]) for place in among]
        drafts = [
            [*said[:count], *((wrong + 1) % VOCAB for wrong in said[count:])]
            for said, count in zip(coming, right, strict=True)
        ]
        logits = rows.draft(self._model_forward, mx.array(drafts))
        assert logits is not None
        with pytest.raises(RuntimeError, match="drafts in them"):
            rows.join([DecodeRows(rows.sessions[0])])
        assert rows.accept(right)
        mx.eval(logits, rows.arrays())
        assert rows.lengths == [length + count for length, count in zip(before, right, strict=True)]
        for row, (place, count) in enumerate(zip(among, right, strict=True)):
            self._record(place, logits[row, :count])

    def _among(self, rows: DecodeRows) -> list[int]:
        return [self.sessions.index(session) for session in rows.sessions if isinstance(session, TrieSession)]

    def _record(self, place: int, logits: mx.array) -> None:
        for each in logits:
            self.sessions[place].record(token(place, self.said[place]))
            self.said[place] += 1
            self.logits[place].append(each)


def read(model: Tiny, session: TrieSession) -> None:
    """The prompt, or what is recorded beyond where the layers stand; its last token as the first step of a decode."""
    while count := session.next_forward(16):
        forward(model, session, count)
    forward(model, session, 1)


def forward(model: Tiny, session: TrieSession, count: int) -> mx.array:
    at = session.position
    with session.forward(count):
        logits = model.model(mx.array([session.recorded[at : at + count]]), cache=session.layers)
    mx.eval(logits, session.state())
    return logits[0, -1]


class Held(NamedTuple):
    """The span, size and content of a snapshot."""

    span: tuple[int, int]
    live: bool
    arrays: list[mx.array]


def arrays_of(snapshot: Snapshot) -> list[mx.array]:
    assert isinstance(snapshot, LayerSnapshot)
    if snapshot._owned is not None:
        return snapshot._owned.arrays
    home = snapshot.owner
    assert home is not None
    return home.copy_tokens(snapshot.start, snapshot.stop).arrays


Trie = dict[tuple[int, ...], tuple[bool, list[Held | None]]]


def trie_of(cache: TrieCache) -> Trie:
    """Returns for each node, by the tokens to its end, if it is a checkpoint, and its snapshots."""
    return {
        tuple(spelled(node.path())): (
            node.checkpoint,
            [
                None if slot is None else Held((slot.start, slot.stop), slot.live, arrays_of(slot))
                for slot in node.slots
            ],
        )
        for node in cache.trie.nodes()
    }


def check_close(ours: Sequence[mx.array], theirs: Sequence[mx.array], tolerance: float) -> None:
    """Relative to the largest entry, where that is more than 1."""
    assert [(x.shape, x.dtype) for x in ours] == [(y.shape, y.dtype) for y in theirs]
    if ours:
        off = [mx.abs(x - y).max() / mx.maximum(1, mx.abs(y).max()) for x, y in zip(ours, theirs, strict=True)]
        assert largest(mx.stack(off)) <= tolerance


def check_same(ours: Sessions, theirs: Sessions) -> None:
    """Both have come to the same: tries, snapshots, layers, bytes."""
    mine, other = trie_of(ours.cache), trie_of(theirs.cache)
    assert {key: point for key, (point, _) in mine.items()} == {key: point for key, (point, _) in other.items()}
    for key, (_, held) in mine.items():
        assert [each and each[:2] for each in held] == [each and each[:2] for each in other[key][1]]
    for x, y in zip(ours.sessions, theirs.sessions, strict=True):
        assert (x.recorded, x.position) == (y.recorded, y.position)
        assert [state.offset for state in x.sequence.states] == [state.offset for state in y.sequence.states]
    check_close(_all_of(ours, mine), _all_of(theirs, {key: other[key] for key in mine}), ours.model.tolerance)
    assert ours.cache.paged_bytes == theirs.cache.paged_bytes
    # A window that has grown by itself has room, or a few tokens more than it needs.
    assert ours.cache.nbytes == theirs.cache.nbytes or ours.model.name == "gemma3"
    assert ours.cache.nbytes <= theirs.cache.nbytes


def _all_of(users: Sessions, trie: Trie) -> list[mx.array]:
    arrays = [array for logits in users.logits for array in logits]
    for _, held in trie.values():
        arrays += [array for each in held if each is not None for array in each.arrays]
    for session in users.sessions:
        for state in session.sequence.states:
            if state.offset:
                arrays += state.copy_tokens(max(0, state.needs(state.offset)), state.offset).arrays
    return arrays


def come_and_go(users: Sessions) -> None:
    users.join(0, 1)
    users.say(0, 1, steps=3)
    users.join(0, 2)
    users.say(0, 1, 2, steps=4)
    users.leave(1)
    users.say(0, 1, 2, steps=2)
    users.join(0, 3, 1)
    users.say(0, 1, 2, 3, steps=10)
    users.close(2)
    users.say(0, 1, 3, steps=2)
    users.close(0, 3)
    users.say(1, steps=3)


@pytest.mark.parametrize("drafted", [False, True], ids=["stepwise", "drafted"])
@every_kind
def test_a_stay_in_a_batch_is_like_decoding_alone(kind: str, drafted: bool) -> None:
    """Afterwards each session goes on alone, or closes and is resumed by others."""
    joined, alone = Sessions(tiny(kind), drafted=drafted), Sessions(tiny(kind), together=False)
    for users in (joined, alone):
        come_and_go(users)
        for place in range(4):
            users.leave(place)
    for users in (joined, alone):
        users.close(3, 1, 0, 2)
        check_trie(users.cache)
    check_same(joined, alone)
    for place, prompt in enumerate(PROMPTS):
        for end in (joined.sessions[place].recorded, prompt, prompt[:-4]):
            cached = [users.cached([*end, 63]) for users in (joined, alone)]
            assert cached[0] == cached[1]
            assert cached[0] == len(end) or end in (prompt, prompt[:-4])
    joined.check_answer([*joined.sessions[2].recorded, 63])


@every_kind
def test_a_row_that_cannot_be_taken_home_fails_alone(kind: str) -> None:
    users = Sessions(tiny(kind), PROMPTS[:3])
    users.join(0, 1, 2)
    users.say(0, 1, 2, steps=3)
    broken = users.sessions[1]
    with patch.object(broken.sequence, "absorb", side_effect=MemoryError), pytest.raises(MemoryError):
        users.leave(1)
    users.rows[0].keep([0, 2])
    broken.close()
    check_locks(users)
    users.say(0, 2, steps=2)
    users.close(0, 2)
    check_trie(users.cache)
    assert users.cached([*broken.recorded, 3]) == (16 if kind == "mamba2" else 0)  # a restore point, copied out before
    for place in (0, 2):
        assert not users.sessions[place].detached
        end = users.sessions[place].recorded
        assert users.check_answer([*end, 3]) == len(end)


@every_kind
def test_a_forward_that_breaks_advances_no_session(kind: str) -> None:
    """Their own layers are only behind: each reads what it has said again, and goes on alone."""
    model = tiny(kind)
    users, alone = Sessions(model, PROMPTS[:3]), Sessions(model, PROMPTS[:3], together=False)
    users.join(0, 1, 2)
    for each in (users, alone):
        each.say(0, 1, 2, steps=5)
    rows = users.rows[0]
    positions = [session.position for session in users.sessions]
    lengths = rows.lengths

    def broken(tokens: mx.array, layers: list[object]) -> mx.array:
        model.model(tokens, cache=layers)
        raise MemoryError

    with suppress(MemoryError):
        rows.compute(broken, mx.array([[1], [2], [3]]))
    assert rows.lengths == lengths
    assert [session.position for session in users.sessions] == positions == [42, 20, 53]
    for place, session in enumerate(users.sessions):
        users.rows[place] = DecodeRows(session)
        assert session.next_forward(100) == 4, "all but the last one, which is a step of a decode"
        read(model, session)
        assert session.position == len(session.recorded)
    for each in (users, alone):
        each.say(0, 1, 2, steps=2)
    for ours, theirs in zip(users.logits, alone.logits, strict=True):
        check_close(ours, theirs, model.tolerance)
    for each in (users, alone):
        each.close(2, 0, 1)
        check_trie(each.cache)
    assert trie_of(users.cache).keys() == trie_of(alone.cache).keys()


def check_locks(users: Sessions) -> None:
    """As many as sessions go through."""
    for node in users.cache.trie.nodes():
        assert node.locks == sum(node in session.node.path() for session in users.cache.sequences.sharing)
