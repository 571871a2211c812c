"""A prefill passes checkpoints inside its forwards, and leaves the same there as one that stops at each."""

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.checkpoints import Checkpoint, CheckpointPolicy, Site
from runner.cache.layers import _ADAPTERS
from runner.cache.layers.scans import StateReads
from runner.cache.layers.snapshot import LayerSnapshot, StateSnapshot
from runner.cache.session import TrieSession
from runner.cache.trie_cache import TrieCache
from runner.disk.serialize import parts
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import Tiny, tiny, words
from tests.lib.driver import ask, ask_uncached, check_equal, check_trie, largest
from tests.lib.kernels import in_front
from tests.model.architectures.caching import packed
from tests.model.cache.test_round_states import EXACT, KNOWN

WINDOWED = ("gemma3_text", "gpt_oss", "llama4")
"""With windows and chunks of 8 to 32 tokens."""
ROUNDED = ("jamba", "mamba", "rwkv7")
"""Further models whose float layers round differently for other numbers of tokens, if these are more than in rounds."""
PASSING = [*(name for name in KNOWN if name != "longcat_flash_ngram"), *WINDOWED]
POINTS, PROMPT, CHUNK = (9, 20, 23, 41, 50), 60, 25
PASSED, STOPPED = [25, 25, 9], [9, 11, 3, 18, 9, 9]
"""The lengths of the forwards."""


class Fixed(CheckpointPolicy):
    """These checkpoints in every prompt."""

    def __init__(self, *points: int) -> None:
        super().__init__()
        self.points = points

    def plan(
        self, tokens: Sequence[int], cached: int, branch: int, most: int | None, fits: int | None = None
    ) -> list[Checkpoint]:
        del branch, most, fits
        return [Checkpoint(at, Site.START) for at in self.points if cached < at < len(tokens)]


def passing(model: Tiny, *points: int, passes: bool = True) -> TrieCache:
    facts = model.facts
    assert facts.passes
    return TrieCache(replace(facts, passes=passes), policy=Fixed(*points))


def prefill(
    model: Tiny, cache: TrieCache, prompt: Sequence[int], chunk: int = CHUNK, most: int = 99
) -> tuple[TrieSession, list[int]]:
    """Computes a prompt but for its last token, in at most `most` forwards. Returns their lengths, too."""
    session, counts = cache.begin(prompt), list[int]()
    while len(counts) < most and (count := session.next_forward(chunk)):
        compute(model, session, count)
        counts.append(count)
    return session, counts


def compute(model: Tiny, session: TrieSession, count: int) -> None:
    at = session.position
    with session.forward(count):
        model.logits(mx.array([session.recorded[at : at + count]]), session.layers)
    mx.eval(session.state())


def ends(cache: TrieCache) -> set[int]:
    return {node.end for node in cache.trie.nodes()}


def contents(cache: TrieCache) -> dict[tuple[int, int, int], list[mx.array]]:
    """Returns what the trie holds: by end of the node, slot and first token."""
    found = {}
    for node in cache.trie.nodes():
        for slot, held in enumerate(node.slots):
            if held is not None:
                assert isinstance(held, LayerSnapshot)
                owned = held.owned if held.owner is None else held.owner.copy_tokens(held.start, held.stop)
                found[node.end, slot, held.start] = owned.arrays
    return found


@pytest.mark.parametrize("name", PASSING)
def test_a_passed_checkpoint_holds_what_a_stop_there_leaves(name: str) -> None:
    """To the bit, if the kernels compute a token as they do in any other forward."""
    exact = in_front() and name in (*EXACT, *WINDOWED) and name not in ROUNDED
    model, held, lengths = packed(name) if exact else build(name), [], []
    for passes in (True, False):
        cache = passing(model, *POINTS, passes=passes)
        session, counts = prefill(model, cache, words(PROMPT))
        session.close()
        check_trie(cache)
        held.append(contents(cache))
        lengths.append(counts)
        if all(state.sliceable or state.whole for _, state in session.sequence.used):  # else windows have grown
            assert cache.sequences.facts.fixed_bytes == model.facts.fixed_bytes
    assert lengths == [PASSED, STOPPED]
    passed, stopped = held
    assert {end for end, *_ in passed} == {*POINTS, PROMPT - 1}
    assert passed.keys() == stopped.keys()
    for key, arrays in passed.items():
        for mine, other in zip(arrays, stopped[key], strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            assert largest(mine - other) <= (0 if exact else model.tolerance * max(1, largest(other))), key


@pytest.mark.parametrize("name", PASSING)
def test_a_prompt_goes_on_from_each_passed_checkpoint(name: str) -> None:
    model, prompt = build(name), words(PROMPT)
    cache = passing(model, *POINTS)
    ask(model, cache, prompt, say=2, chunk=CHUNK)
    for at in reversed(POINTS):
        other = [*prompt[:at], *words(12, seed=at)]
        answer = ask(model, cache, other, say=2, chunk=CHUNK)
        assert answer.session.cached == at
        check_equal(model, answer, ask_uncached(model, other, say=2, chunk=CHUNK))
        check_trie(cache)


@pytest.mark.parametrize("why", ["scan", "class", "forward"])
def test_a_prefill_stops_where_a_layer_shows_no_states(why: str) -> None:
    """Known from the sketch, or from the first forward, which loses its checkpoints."""
    model = build("mamba" if why == "scan" else "qwen3_next")
    with (
        patch("runner.model.scans.functions.available", lambda *_, **__: why != "scan"),
        patch.dict(_ADAPTERS, clear=why == "class"),
    ):
        cache = TrieCache(model.facts, policy=Fixed(*POINTS))
        with patch.object(StateReads, "known", StateReads.known if why != "forward" else False):
            session, counts = prefill(model, cache, words(PROMPT))
    session.close()
    assert counts == ([25, 16, 9, 9] if why == "forward" else STOPPED)
    assert ends(cache) == {*POINTS[3 if why == "forward" else 0 :], PROMPT - 1}
    check_trie(cache)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize("fault", ["failed", "distrusted"])
def test_a_forward_that_failed_leaves_no_checkpoints(name: str, fault: str) -> None:
    """Those of earlier forwards stay, unless the layers have computed no numbers."""
    model = tiny(name)
    cache = passing(model, *POINTS)
    session, counts = prefill(model, cache, words(PROMPT), most=2)
    assert counts == PASSED[:2]
    assert ends(cache) == {*POINTS}
    setattr(session, fault, True)
    session.close()
    assert ends(cache) == ({9, 20, 23} if fault == "failed" else set())
    check_trie(cache)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "llama4"])
def test_others_share_what_an_open_session_has_passed(name: str) -> None:
    model, prompt = tiny(name), words(PROMPT)
    others = [[*prompt[:at], *words(12, seed=at)] for at in (23, 45)]
    cache = passing(model, 23)
    session, _ = prefill(model, cache, prompt, most=0)
    assert cache.follows(others[1])
    assert session.next_forward(PROMPT) == PROMPT - 1
    compute(model, session, PROMPT - 1)
    for other, at in zip(others, (23, 45), strict=True):
        assert not cache.follows(other)
        answer = ask(model, cache, other, say=2)
        assert answer.session.cached == at
        check_equal(model, answer, ask_uncached(model, other, say=2))
    session.close()
    check_trie(cache)
    check_equal(model, ask(model, cache, prompt, say=3), ask_uncached(model, prompt, say=3))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", "qwen3_next"])
def test_no_forward_leaves_more_than_the_budget_and_what_runs(name: str) -> None:
    """Under budgets from one byte to several conversations: layers that run, an eighth for checkpoints, forks."""
    model, chance = tiny(name), random.Random(5)
    facts, policy = model.facts, CheckpointPolicy(gap=1, first_distance=4)
    for budget in [1, *(chance.randrange(facts.bytes_of(6 * PROMPT)) for _ in range(9))]:
        cache = TrieCache(replace(facts), budget, policy)
        for turn in range(3):
            sessions = [cache.begin([*words(20 * turn), *words(PROMPT, seed=chance.randrange(9))]) for _ in range(2)]
            while waiting := [each for each in sessions if each.position < each.total - 1]:
                session = chance.choice(waiting)
                compute(model, session, session.next_forward(chance.choice([2, 9, PROMPT])))
                layers = sum(state.nbytes for each in sessions for state in each.sequence.states)
                forks = sum(node.nbytes for node in cache.trie.nodes() if len(node.children) > 1)
                least = max(budget // 8, 2 * cache.sequences.facts.point_bytes) + forks
                assert cache.nbytes <= max(budget, layers + least)
            for session in sessions:
                session.close()
            check_trie(cache)


def test_a_detached_session_neither_stops_nor_holds_states() -> None:
    model = tiny("qwen3_next")
    cache = passing(model, *POINTS)
    session, _ = prefill(model, cache, words(PROMPT), most=1)
    cache.detach()
    compute(model, session, session.next_forward(PROMPT))
    assert session.position == PROMPT - 1
    assert not any(state.passed_arrays() for _, state in session.sequence.used)
    session.close()


def test_the_disk_gets_the_state_at_a_passed_checkpoint() -> None:
    model = tiny("qwen3_next")
    cache = passing(model, *POINTS)
    session, _ = prefill(model, cache, words(PROMPT), chunk=PROMPT)
    right = contents(cache)
    live = [
        (node, slot, held)
        for node in cache.trie.nodes()
        for slot, held in enumerate(node.slots)
        if isinstance(held, StateSnapshot) and held.live
    ]
    assert {node.end for node, *_ in live} == {*POINTS}
    for node, slot, held in live:
        found, _ = parts(held, held.start, held.stop)
        same = zip((part.array for part in found), right[node.end, slot, held.start], strict=True)
        assert all(mx.array_equal(mine, other) for mine, other in same)
    session.close()
