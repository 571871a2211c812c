"""`scripts/bench trace` without a model: traces and their files, bounds, policies of others, and the report."""

import json
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest

from runner.cache.checkpoints import Site
from runner.cache.eviction import Eviction, EvictionOrder
from runner.cache.node import common_prefix, keys
from runner.cache.trie import PrefixTrie
from scripts.tools.bench import trace
from scripts.tools.bench.report import targets_table
from scripts.tools.bench.servers import OLLAMA, OURS
from scripts.tools.bench.traces.bounds import Kind, Paths, belady, best, blocks
from scripts.tools.bench.traces.form import FIRST, TURN, Request, Turns, lines_of, read
from scripts.tools.bench.traces.generator import SITUATIONS, edited, generate
from scripts.tools.bench.traces.simulated import KINDS, LRU, POLICIES, Lru, OllamaOrder, OllamaPoints, Simulation

SMALL = 0.02


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_seed_decides_what_sessions_ask_and_when(situation: str) -> None:
    requests = generate(situation, 3, SMALL)
    assert requests == generate(situation, 3, SMALL)
    assert [each.prompt for each in requests] != [each.prompt for each in generate(situation, 4, SMALL)]
    ends: dict[str, float] = {}
    for each in requests:
        assert each.at_ms >= ends.get(each.session, 0.0), "a session waits for its answer"
        ends[each.session] = each.end_ms


def test_a_prompt_continues_what_was_said_until_a_task_ends() -> None:
    wholes = [[*each.prompt, *each.answer] for each in generate("long-task", 1, SMALL)]
    continued = [common_prefix(one, other) == len(one) for one, other in pairwise(wholes)]
    assert continued == [at not in (50, 59) for at in range(len(wholes) - 1)], "thinking is dropped at the next task"


def test_a_file_says_what_requests_share_in_whole_blocks() -> None:
    block, requests = 16, generate("mixed", 2, SMALL)
    lines = [*lines_of(requests, block)]
    back = read(lines, block)
    assert [(each.session, len(each.prompt), len(each.answer)) for each in back] == [
        (each.session, len(each.prompt), len(each.answer)) for each in requests
    ]
    assert [[token == TURN for token in each.prompt] for each in back] == [
        [token == TURN for token in each.prompt] for each in requests
    ]
    wholes, others = ([keys((*each.prompt, *each.answer)) for each in trace[::3]] for trace in (requests, back))
    for (one, other), (same, different) in zip(combinations(wholes, 2), combinations(others, 2), strict=True):
        shared, found = common_prefix(one, other), common_prefix(same, different)
        assert found == shared if shared in (len(one), len(other)) else shared - shared % block <= found <= shared


def test_lines_of_others_are_read() -> None:
    row = {"timestamp": 3000, "input_length": 700, "output_length": 2, "hash_ids": [9, 4]}
    later = {"session_id": "a", "input_length": 3, "output_length": 2, "hash_ids": [7], "delay": 50}
    lines = [json.dumps({**row, **more}) for more in ({"hash_ids": [9, 5]}, {"timestamp": 2000, "session_id": "a"})]
    first, second, third = read([*lines, json.dumps(later)])
    assert [first.at_ms, second.at_ms, third.at_ms] == [2000, 2100, 3000], "in order of time"
    assert common_prefix([*first.prompt], [*third.prompt]) == 512
    assert (len(first.prompt), len(third.prompt)) == (700, 700)
    assert second.prompt[:702] == [*first.prompt, *first.answer]
    assert len(second.prompt) == 705
    with pytest.raises(ValueError, match="line 1: 2 blocks of 256 tokens do not hold 700"):
        read([json.dumps(row)], 256)
    with pytest.raises(ValueError, match="line 2 is no request of a trace: KeyError"):
        read([json.dumps(row), "{}"])


def test_a_session_takes_turns_with_others() -> None:
    turns = Turns([Request(at_ms, session, [1], [1]) for at_ms, session in ((0, "a"), (1, "a"), (2, "b"), (9, "c"))])
    assert [turns.next(5), turns.next(5), turns.next(5)] == [0, 2, None]
    turns.put_back(2)
    turns.end(0)
    assert [turns.next(5), turns.next(5), turns.next()] == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percent", [15, 60])
def test_nothing_is_better_than_what_knows_the_future(kind: str, percent: int) -> None:
    layers, requests = KINDS[kind], generate("chats", 1, SMALL)[:30]
    paths = Paths(requests)
    budget = paths.working_set(layers) * percent // 100
    computed = [trace.computed_tokens(requests, Simulation(layers, budget, each).play(requests)) for each in POLICIES]
    computed.append(blocks(requests, layers, budget))
    known = best(paths, layers, budget)
    assert paths.least <= known
    assert min(computed) >= (known if kind == "kv" else paths.least)
    assert best(paths, layers, 2 * paths.working_set(layers)) == paths.least


A, B = [*range(FIRST, FIRST + 12)], [*range(FIRST + 50, FIRST + 62)]
MINI = [Request(0, "a", A[:8], A[8:]), Request(1, "b", B[:8], B[8:]), Request(2, "a", [*A, 5], [6])]


@pytest.mark.parametrize(
    ("policy", "tokens", "computed"),
    [
        (blocks, 12, 8 + 8 + 13),  # the second evicts the first
        (blocks, 20, 8 + 8 + 5),  # and then only its last block
        (belady, 13, 8 + 8 + 12),
        (belady, 20, 8 + 8 + 5),
        (belady, 24, 8 + 8 + 1),
    ],
)
def test_policies_by_hand(policy: Callable[..., int], tokens: int, computed: int) -> None:
    if policy is blocks:
        assert blocks(MINI, Kind(2), 2 * tokens, block=4) == computed
    else:
        assert belady(Paths(MINI), Kind(2), 2 * tokens) == computed


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        (Lru, [6, 8]),  # leaves alone; the stem goes with the last one
        (OllamaOrder, [6, 4, 8]),  # the stem, used before its last child, is merged into it
    ],
)
def test_the_orders_of_others(order: type[EvictionOrder], ends: Sequence[int]) -> None:
    trie = PrefixTrie()
    eviction = Eviction(trie, order((0,)))
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 7, 7, 7]):
        trie.touch(eviction.order.used(trie.extend(trie.root(), keys(tokens))[-1]))
    found = []
    for victim in eviction.victims():
        found.append(victim.end)
        trie.merge(victim) if victim.children else trie.remove(victim)
    assert found == ends


def test_ollamas_points() -> None:
    points = OllamaPoints().plan(range(20_000), 100, 9000, None)
    assert points == [(8192, Site.FAR), (9000, Site.BRANCH), (16384, Site.FAR), (19_996, Site.BEFORE)]


def test_requests_that_overlap_wait_for_a_prefix_and_share_the_time() -> None:
    stem, first, second, other = ([*range(at, at + 600)] for at in range(1000, 5000, 1000))
    prompts = {"first": [*stem, *first], "second": [*stem, *second], "other": other}
    requests = [Request(0.0, session, prompt, [1]) for session, prompt in prompts.items()]
    requests.append(Request(1e3, "first", [*prompts["first"], 1, 2], [3]))
    played = Simulation(KINDS["kv"], None, chunk=100).play(requests, 8)
    assert [each.cached for each in played] == [0, 600, 0, 1201]
    assert [each.forwards for each in played] == [12, 6, 6, 0]


def test_each_policy_evicts_in_its_own_order() -> None:
    requests, layers = generate("retries", 1, 0.1)[:60], KINDS["hyb"]
    budget = Paths(requests).working_set(layers) // 5
    played = [Simulation(layers, budget, policy).play(requests) for policy in POLICIES]
    assert len({tuple(each.cached for each in found) for found in played}) == len(POLICIES)


def test_an_edit_costs_what_it_parts_from_alone() -> None:
    requests = edited(1, 11)
    matched = Paths(requests).matched[-1]
    assert Simulation(KINDS["kv"], None).play(requests)[-1].cached == matched
    assert 0 <= trace.edit_tokens("hyb", 1) < matched


def test_the_report_adds_traces_up_and_compares_them_with_the_best_known() -> None:
    computed = {trace.BEST: 110, OURS: 130, LRU: 140, OLLAMA: 150, trace.BLOCKS: 160}
    rows = [
        trace.Row(name, 1, "hyb", 25, 10, 100, computed, forwards, 0.9)
        for name, forwards in (("a", (6, 4)), ("b", (1, 3)))
    ]
    found = trace.policy_report(rows, 20)
    assert [row[1] for row in targets_table(found.targets).rows] == ["3", "20", "1", "0.9"]
    assert found.targets[0].bound == 1.5
    assert found.tables[0].rows == [["hyb 25 %", "0", "0", "0", "0", "0"]]
    assert found.tables[1].rows == [["a", "hyb", "0.0 / 0.0"], ["b", "hyb", "0.0 / 0.0"]]


def test_a_conversation_that_outgrows_the_budget_keeps_its_beginning() -> None:
    """Up to where its tokens and a checkpoint fit, which is less than a window with the room of its layer."""
    talk = [TURN if at % 100 == 0 else 10 + at % 7 for at in range(4000)]
    requests = [Request(1e3 * turn, "a", talk[: 100 * turn], [5]) for turn in range(1, 41)]
    played = Simulation(Kind(2, 20, 64), 6000, chunk=256).play(requests)
    assert min(each.cached for each in played[-5:]) > 1500
