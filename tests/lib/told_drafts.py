"""Drafts that a test chooses, and what clients and the cache have of the answers."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import msgspec

from protocol.stats import CacheNode
from runner.cache.session import Session
from runner.drafts.draft_policy import DraftPolicy
from runner.drafts.drafting import AnswerDrafter, DraftedStep, Drafting, StepTime
from runner.engine.events import Event, Finished, Text
from runner.engine.generation import Generation
from runner.engine.lifecycle import Lifecycle
from runner.numbers.cache import cache_nodes
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB, words
from tests.lib.tiny_engine import ClientRequest, RequestSpec, TinyEngine, oracle_answer

EOS = 17
MOST = 7
UNMARKABLE = ("deepseek_v41",)
DRAFTABLE = tuple(name for name in KINDS if name not in UNMARKABLE)
"""The kinds of model whose layers can go back."""


class Strategy(NamedTuple):
    """Makes drafts from the tokens that will come."""

    make: Callable[[Sequence[int], random.Random], list[int]]
    most: int = MOST


def _wrong(token: int) -> int:
    return (token + 1) % VOCAB


STRATEGIES = {
    "right": Strategy(lambda coming, _: [*coming]),
    "right, of any length": Strategy(lambda coming, numbers: [*coming[: numbers.randint(2, MOST)]]),
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


class Told(AnswerDrafter):
    """Knows the answer."""

    def __init__(self, shared: "ToldTogether", client: ClientRequest, strategy: Strategy, seed: int) -> None:
        super().__init__(shared, client.request.keys)
        self._start = len(client.spec.prompt)
        self._answer = oracle_answer(client.kind.name, client.spec).tokens
        self._strategy = strategy
        self._numbers = random.Random(seed)
        self.rounds: list[tuple[int, int]] = []

    def index(self, tokens: int) -> None: ...

    def close(self) -> None: ...

    def coming(self, session: Session, most: int) -> Sequence[int]:
        at = len(session.recorded) - self._start
        coming = [*self._answer[at : at + self._strategy.most], *[5] * MOST][: self._strategy.most]
        return self._strategy.make(coming, self._numbers)[:most]

    def record_outcome(self, drafts: int, right: int, life: Lifecycle) -> None:
        self.rounds.append((drafts, right))


class ToldTogether(Drafting):
    """Lets each answer of a forward try what it knows."""

    def __init__(self) -> None:
        super().__init__(DraftPolicy(skips_padding=True))
        self.measuring = 1
        self.rounds_together: list[float] = []
        """The average number of positions without padding, in each round of several answers."""
        self.lengths: list[int] = []
        """The length of each step, as `StepTime` has it."""

    def look(self, answers: Sequence[tuple[AnswerDrafter, Session]], step: int) -> bool:
        return True

    def expects(self, step: DraftedStep) -> bool:
        return any(len(drafts) > 1 for drafts in self.propose(step))

    def propose(self, step: DraftedStep) -> Sequence[Sequence[int]]:
        assert 0 < len(step.answers) <= step.together
        return [cast("Told", each.drafter).coming(each.session, each.most) for each in step.answers]

    def record_time(self, drafters: Sequence[AnswerDrafter], step: StepTime) -> None:
        assert step.tokens >= step.together >= len(drafters) > 0
        assert step.length >= -1
        assert step.seconds >= 0
        self.lengths.append(step.length)
        if step.together > 1 and step.length > 1:
            self.rounds_together.append(step.asked)


def told(engine: TinyEngine, strategy: str | Strategy) -> list[Told]:
    """Lets the engine draft."""
    chosen = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    drafters, shared = list[Told](), ToldTogether()

    def make(generation: Generation) -> Told:
        client = cast("ClientRequest", generation.request.stream)
        drafters.append(Told(shared, client, chosen, len(drafters)))
        return drafters[-1]

    engine.let_draft(shared, make)
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
    """The answers of an engine, as clients and the cache have them."""

    tokens: list[list[int]]
    events: list[list[object]]
    cached: list[int]
    nodes: list[CacheNode]
    """Without the bytes in buffers, whose room for tokens to come depends on the way."""


def seen(engine: TinyEngine) -> Seen:
    nodes = [
        msgspec.structs.replace(node, id=0, parent=None, idle_uses=0, bytes=0, live_bytes=0)
        for node in cache_nodes(engine.scheduler.cache)
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
