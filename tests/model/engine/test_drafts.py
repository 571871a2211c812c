"""An answer is the same with drafts as without them, whatever the drafts are, and so is what the cache keeps of it."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec
import pytest

from protocol.stats import CacheNode
from runner.cache.session import LiveSession
from runner.engine.events import Event, Finished, Text
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB, words
from tests.lib.tiny_engine import ClientRequest, RandomPolicy, RequestSpec, TinyEngine, oracle_answer, text_of

EOS = 17
MOST = 7
UNMARKABLE = ("deepseek_v41",)


class Strategy(NamedTuple):
    """Makes drafts from the tokens that will come."""

    make: Callable[[Sequence[int], random.Random], list[int]]
    most: int = MOST


def _wrong(token: int) -> int:
    return (token + 1) % VOCAB


STRATEGIES = {
    "right": Strategy(lambda coming, _: [*coming]),
    "wrong": Strategy(lambda coming, _: [_wrong(token) for token in coming]),
    "random": Strategy(
        lambda coming, numbers: [
            token if numbers.random() < 0.7 else numbers.randrange(VOCAB)
            for token in coming[: numbers.randint(0, len(coming))]
        ]
    ),
    "right, then wrong": Strategy(
        lambda coming, _: [token if place < 3 else _wrong(token) for place, token in enumerate(coming)]
    ),
    "beyond the vocabulary": Strategy(lambda coming, _: [*coming[:2], VOCAB, *coming[2:]]),
    "negative": Strategy(lambda coming, _: [*coming[:1], -3, *coming[1:]]),
    "an end inside": Strategy(lambda coming, _: [*coming[:2], EOS, *coming[2:]]),
    "one at a time": Strategy(lambda coming, _: [*coming], 1),
}
"""The drafts, given the right ones."""


class Told:
    """Knows the answer."""

    def __init__(self, client: ClientRequest, strategy: Strategy, seed: int) -> None:
        self._start = len(client.spec.prompt)
        self._answer = oracle_answer(client.kind.name, client.spec).tokens
        self._strategy = strategy
        self._numbers = random.Random(seed)
        self.rounds: list[tuple[int, int]] = []

    def index(self, tokens: int) -> None: ...

    def took(self, tokens: int, rows: int, seconds: float) -> None:
        assert tokens > 0
        assert rows >= -1
        assert seconds >= 0

    def close(self) -> None: ...

    def expects(self, session: LiveSession, most: int) -> bool:
        return len(self.propose(session, most)) > 1

    def propose(self, session: LiveSession, most: int) -> Sequence[int]:
        at = len(session.recorded) - self._start
        coming = [*self._answer[at : at + self._strategy.most], *[5] * MOST][: self._strategy.most]
        return self._strategy.make(coming, self._numbers)[:most]

    def learn(self, drafts: int, right: int) -> None:
        self.rounds.append((drafts, right))


def told(engine: TinyEngine, strategy: str) -> list[Told]:
    """Lets the engine draft."""
    drafters: list[Told] = []

    def make(client: ClientRequest) -> Told:
        drafters.append(Told(client, STRATEGIES[strategy], len(drafters)))
        return drafters[-1]

    engine.drafter = make
    return drafters


OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 4},
    "filtered": {"temperature": 1.2, "seed": 5, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "seed": 6, "repeat_penalty": 1.3, "presence_penalty": 0.4, "repeat_last_n": 8},
    "log-probabilities": {"temperature": 0.5, "seed": 7, "logprobs": True, "top_logprobs": 3},
}


def spec(options: str, max_tokens: int = 20, prompt: Sequence[int] = ()) -> RequestSpec:
    wanted = SamplingOptions(**OPTIONS[options])  # type: ignore[arg-type]  # names and types are the struct's own
    return RequestSpec(tuple(prompt or words(30)), max_tokens, wanted)


class Seen(NamedTuple):
    """What a client and the cache have of an answer and of another one behind it."""

    tokens: list[list[int]]
    events: list[list[object]]
    cached: list[int]
    nodes: list[CacheNode]
    """Without the bytes in buffers, whose room for tokens to come depends on the way."""


def seen(engine: TinyEngine) -> Seen:
    nodes = [
        msgspec.structs.replace(node, id=0, parent=None, idle_uses=0, bytes=0, live_bytes=0)
        for node in engine.scheduler.cache.nodes()
    ]
    return Seen(
        [asked.tokens for asked in engine.requests],
        [[plain(event) for event in asked.received] for asked in engine.requests],
        [asked.cached for asked in engine.requests],
        nodes,
    )


def plain(event: Event) -> object:
    """Without times; `TinyEngine.check` compares log-probabilities."""
    if isinstance(event, Text):
        return event.text, [(entry.token, len(entry.top_logprobs)) for entry in event.logprobs]
    if isinstance(event, Finished):
        return event.reason, event.metrics.eval_count, event.metrics.prompt_eval_count
    return type(event)


def conversation(name: str, asked: RequestSpec, strategy: str = "", cache: str = "trie") -> tuple[Seen, list[Told]]:
    """An answer, and one more turn behind it."""
    engine = TinyEngine(name, cache=cache, eos=asked.eos)
    drafters = told(engine, strategy) if strategy else []
    first = engine.submit(asked)
    engine.finish()
    following = (*asked.prompt, *first.tokens, *words(7, 3))
    engine.submit(asked._replace(prompt=following))
    engine.finish()
    engine.check()
    return seen(engine), drafters


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind not in UNMARKABLE])
def test_drafts_change_nothing(name: str, options: str, strategy: str) -> None:
    asked = spec(options)
    wanted, _ = conversation(name, asked)
    found, drafters = conversation(name, asked, strategy)
    assert found == wanted
    rounds = [each for drafter in drafters for each in drafter.rounds]
    assert rounds
    if strategy == "right":
        assert all(drafts == right for drafts, right in rounds)
    if strategy == "wrong":
        assert not any(right for _, right in rounds)


@pytest.mark.parametrize("strategy", ["right", "random"])
@pytest.mark.parametrize("cache", ["single", "none"])
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind not in UNMARKABLE])
def test_every_cache_keeps_the_same(name: str, cache: str, strategy: str) -> None:
    asked = spec("drawn")
    wanted, _ = conversation(name, asked, cache=cache)
    found, _ = conversation(name, asked, strategy, cache)
    assert found == wanted


@pytest.mark.parametrize("strategy", ["right", "random"])
@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_an_answer_may_end_anywhere_in_a_round(name: str, place: int, strategy: str) -> None:
    """By an end-of-sequence token, a stop string, or its length: the cache keeps what it keeps without drafts."""
    asked = spec("drawn", 12)
    answer = oracle_answer(name, asked).tokens
    token = answer[place - 1]
    for changes in ({"eos": frozenset({token})}, {"stop": text_of([token])}, {"max_tokens": place}):
        ends = asked._replace(**changes)
        wanted, _ = conversation(name, ends)
        found, _ = conversation(name, ends, strategy)
        assert found == wanted, changes


def at_call(number: int) -> Callable[[int, int], bool]:
    """Breaks one call of the model."""
    calls = count(1)
    return lambda rows, length: next(calls) == number


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1", "quantized", "llama4"])
def test_requests_that_come_and_go(name: str, seed: int) -> None:
    """Joins, leaves, cancels, restarts for want of memory, and evictions, among rounds."""
    numbers = random.Random(seed)
    engine = TinyEngine(name, RandomPolicy(numbers), budget=600_000, parallel=4)
    drafters = told(engine, "random")
    for number in range(12):
        options = numbers.choice([*OPTIONS])
        prompt = (*words(numbers.choice((20, 30, 40)), number % 3), *words(number % 5, 9))
        engine.submit(spec(options, numbers.randint(3, 16), prompt=prompt))
        engine.advance(numbers.randint(0, 25))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
        if numbers.random() < 0.2:
            engine.forward.error = MemoryError
            engine.forward.breaks = at_call(numbers.randint(1, 3))
    engine.forward.breaks = lambda rows, length: False
    engine.finish()
    engine.check()
    assert any(drafter.rounds for drafter in drafters)


def test_nothing_is_drafted_beside_another_answer() -> None:
    engine = TinyEngine("llama4")  # whose answers do not share batches
    drafters = told(engine, "right")
    for asked in (spec("greedy", 60), spec("drawn", 12, prompt=words(20, 5))):
        engine.submit(asked)
    engine.until(lambda: len(engine.scheduler.batches.all) == 2)
    before = [len(drafter.rounds) for drafter in drafters]
    engine.until(lambda: len(engine.scheduler.batches.all) == 1)
    assert [len(drafter.rounds) for drafter in drafters] == before
    engine.finish()
    assert any(len(drafter.rounds) > rounds for drafter, rounds in zip(drafters, before, strict=True))
    engine.check()


GRAMMARS = {
    "digits": "start: /[0-9]{4,30}/",
    "an end that depends": 'start: ("<>" /[1-3]/)* "."',
    "forced text between": 'start: (/[0-9]/ "<=====>")* "!"',
    "alternatives": 'start: ("123, " | "45, " | "1236789; ")+ "!!!"',
    "nested": 'start: value\nvalue: "(" (value ("," value)*)? ")" | /[1-3]{1,3}/',
    "anything": "start: /[^9]*/",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", ["greedy", "drawn", "penalties", "log-probabilities"])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_drafts_change_nothing_in_a_format(name: str, grammar: str, options: str, strategy: str) -> None:
    asked = spec(options, 24)._replace(grammar=GRAMMARS[grammar])
    for eos in (frozenset[int](), frozenset({EOS})):
        wanted, _ = conversation(name, asked._replace(eos=eos))
        found, drafters = conversation(name, asked._replace(eos=eos), strategy)
        assert found == wanted
        if strategy == "right" and grammar == "digits":
            assert any(right > 1 for drafter in drafters for _, right in drafter.rounds)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_masks_may_be_late_among_rounds(name: str, seed: int) -> None:
    numbers = random.Random(seed)
    engine = TinyEngine(name, RandomPolicy(numbers))
    engine.late = lambda: numbers.choice((0, 0, 0, 1, 2))
    drafters = told(engine, "random")
    for number in range(8):
        asked = spec(numbers.choice([*OPTIONS]), numbers.randint(3, 30), prompt=words(20 + number % 3, number % 2))
        engine.submit(asked._replace(grammar=numbers.choice(["", *GRAMMARS.values()])))
        engine.advance(numbers.randint(0, 60))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
    engine.finish()
    engine.check()
    assert any(drafter.rounds for drafter in drafters)


def test_a_request_may_limit_its_drafts() -> None:
    engine = TinyEngine("llama")
    drafters = told(engine, "right")
    limited = ClientRequest(engine.kind, spec("greedy"))
    limited.request.most_drafts = 2
    engine.requests.append(limited)
    engine.scheduler.add(limited.request)
    engine.finish()
    engine.check()
    assert {drafts for drafts, _ in drafters[0].rounds} <= {1, 2}
