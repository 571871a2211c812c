"""Answers that are drafted from what their model computes, as an engine would have it."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import mlx.core as mx

from runner.cache.interface import PrefixCache
from runner.cache.session import Session
from runner.drafts.drafting import AnswerDrafter, DraftedAnswer
from runner.drafts.hidden_states import AnyText, HiddenStateDrafter
from runner.drafts.target import Draw
from runner.model.weights.loading import LoadedModel
from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sampler

PROMPT = [(7 * index + index * index) % 200 for index in range(21)]
NOBODY = cast("AnswerDrafter", None)
GREEDY = SamplingOptions(temperature=0)
DRAWN = {
    "greedy": GREEDY,
    "drawn": SamplingOptions(temperature=0.9, seed=5),
    "filtered": SamplingOptions(temperature=1.2, seed=7, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingOptions(
        temperature=0.8, seed=9, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, repeat_last_n=16
    ),
}


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


class Counting:
    """A layer of a target, as far as a drafter looks."""

    offset = 0


class Drawing(NamedTuple):
    """A sampler and its rows, as far as a drafter looks."""

    draw: Draw
    kind: object
    """No two are of one kind."""

    def _own(self) -> "Drawing":
        return self

    def copy(self) -> "Drawing":
        return self

    def __call__(self, scores: mx.array) -> mx.array:
        return self.draw(scores)


def standing(layers: list[object], position: int, recorded: Sequence[int], draw: Draw = greedy) -> DraftedAnswer:
    """An answer whose layers have seen the first `position` of the `recorded` tokens, as far as a drafter looks."""
    session = cast("Session", SimpleNamespace(layers=layers, recorded=recorded))
    return DraftedAnswer(NOBODY, session, 99, cast("Sampler", Drawing(draw, object())), 0, position)


def proposed(
    drafter: HiddenStateDrafter[AnyText],
    layers: list[object],
    position: int,
    recorded: Sequence[int],
    most: int,
    draw: Draw,
) -> list[int]:
    (tokens,) = drafter.propose([standing(layers, position, recorded, draw)], layers, most)
    return [*tokens]


class Said(NamedTuple):
    """An answer and how it came about."""

    tokens: list[int]
    drafted: int
    accepted: int
    session: Session


Observe = Callable[[Session, list[int]], None]


def answer(
    loaded: LoadedModel,
    cache: PrefixCache,
    prompt: Sequence[int],
    count: int,
    options: SamplingOptions,
    drafter: HiddenStateDrafter[AnyText] | None = None,
    most: int = 0,
    observe: Observe = lambda *_: None,
    part: int = 16,
) -> Said:
    """Answers a prompt with `count` tokens, `most` drafts in each round. `observe` sees the session and the drafts
    before each of them."""
    forward = loaded.logits if drafter is None else drafter.watch(loaded.logits)
    session = cache.begin(prompt)
    try:
        while length := session.next_forward(part):
            at = session.position
            with session.forward(length):
                forward(mx.array([prompt[at : at + length]]), session.layers)
            mx.eval(session.state())
        vocab_size = loaded.logits(mx.array([[1]]), loaded.make_layers()).shape[-1]
        sampler = Sampler(options, prompt, vocab_size, 4096)
        end, drafted, accepted = len(prompt) + count, 0, 0
        while len(session.recorded) < end:
            drafts = list[int]()
            wanted = min(most, end - len(session.recorded) - 1)
            if drafter is not None and wanted > 0:
                asking = DraftedAnswer(NOBODY, session, wanted, sampler, 0, session.position)
                drafts = [*drafter.propose([asking], session.layers, wanted)[0]]
                observe(session, drafts)
            tokens = mx.array([[session.recorded[-1], *drafts]])
            with session.draft_round(1 + len(drafts)) if drafts else session.forward(1):
                logits = forward(tokens, session.layers)
            drawn = [choice.token for choice in sampler.draw_ahead(logits[0], drafts).read()]
            right = 0
            while right < len(drafts) and drawn[right] == drafts[right]:
                right += 1
            sampler.skip(drawn[: right + 1])
            for token in drawn[: right + 1]:
                session.record(token)
            if drafts:
                assert session.accept(1 + right)
            drafted, accepted = drafted + len(drafts), accepted + right
        return Said(session.recorded[len(prompt) :], drafted, accepted, session)
    finally:
        session.close()
