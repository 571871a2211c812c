"""Models that draft for the engine's tiny models, and a drafting that lets them whatever the clock says."""

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path

from runner.cache.session import Session
from runner.drafts.assistant import Assistant, AssistantDrafter
from runner.drafts.dflash.drafter import BlockDrafter
from runner.drafts.draft_policy import Draft, DraftPolicy
from runner.drafts.drafting import DraftedAnswer, DraftedStep, Drafting, DraftModel
from runner.drafts.heads.head import Head, HeadDrafter, QwenHead
from runner.drafts.own_model import OwnDraftModel
from runner.drafts.target import target_of
from runner.engine.generation import Forward
from runner.model.weights.loading import LoadedModel
from runner.model.weights.parameters import parameters_of
from scripts.tools.models.dflash import DFLASH2, DRAFT, DSPARK
from scripts.tools.models.tiny import VOCAB, spread, tiny, words
from tests.lib.tiny_engine import RandomPolicy, RequestSpec, TinyEngine, oracle_answer, plain_forward
from tests.lib.told_drafts import STRATEGIES
from tests.model.drafts.assistant.made import tiny_assistant
from tests.model.drafts.dflash.tiny_drafts import tiny_draft


def turns(name: str, asked: RequestSpec) -> Sequence[RequestSpec]:
    """A request, one more turn of its conversation, and another one in place of a part of the prompt."""
    again = (*asked.prompt, *oracle_answer(name, asked).tokens, *words(7, 3))
    edited = (*asked.prompt[:25], *words(70, 4))
    return [asked, *(asked._replace(prompt=prompt) for prompt in (again, edited))]


class Eager(DraftPolicy):
    """Always lets the model draft, by itself, as many tokens as this; and known text be drafted as many as that."""

    def __init__(self, length: int, known: int) -> None:
        super().__init__(7, [1.0] * 64)
        self._drafts, self._known = length, known

    def lengths(self, drafts: Sequence[Draft], *_: Any, **__: Any) -> list[int]:
        return [self._known] * len(drafts)

    def model_length(self, mosts: Sequence[int], *_: Any, **__: Any) -> int:
        return min(max(mosts), self._drafts)


class Willing(Drafting):
    """Drafts whatever the clock says."""

    def __init__(self, model: DraftModel, length: int = 4, known: int = 0) -> None:
        super().__init__(Eager(length, known), model=model)
        for speed in (
            self.speed(together, by_model=by_model) for together in (1, 2, 4, 8) for by_model in (True, False)
        ):
            speed.record = lambda *_, **__: None  # type: ignore[method-assign]  # it would compare real times
        self.watch = model.watch
        self.mixed = 0
        """The rounds in which some drafts are from known text, and some of the model."""
        self.most_together = 0
        """The most answers with drafts in one round."""

    def propose(self, step: DraftedStep) -> Sequence[Sequence[int]]:
        found = super().propose(step)
        drafts = [each.drafter._draft for each in step.answers]
        self.most_together = max(self.most_together, sum(draft is not None for draft in drafts))
        self.mixed += len({draft.source == "model" for draft in drafts if draft is not None}) > 1
        return found

    @property
    def drafted(self) -> int:
        return self.counts().drafted["model"]

    def engine(self, name: str, schedule: RandomPolicy | None = None, **arguments: object) -> TinyEngine:
        """Returns an engine that drafts with this model."""
        return TinyEngine(name, schedule, watch=self.watch, drafting=self, **arguments)  # type: ignore[arg-type]


def own_model(kind: str, vocab_size: int = VOCAB) -> OwnDraftModel:
    return OwnDraftModel(kind, tiny(kind).make_layers, plain_forward(tiny(kind)), vocab_size)


class Stranger:
    """Drafts tokens at random, some of them beyond the vocabulary."""

    name = "stranger"
    at_once = False
    most_together = 8
    nbytes = 0

    def __init__(self) -> None:
        self._numbers = random.Random(3)

    def most_bytes(self, answers: int) -> int:
        return answers

    def watch(self, forward: Forward) -> Forward:
        return forward

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        return self._numbers.random() < 0.2

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        lengths = [self._numbers.randint(0, most) for _ in answers]
        return [[self._numbers.randint(-1, VOCAB) for _ in range(length)] for length in lengths]

    def free(self) -> None: ...


class Broken(Stranger):
    """Raises in a call, and must not be called again."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._calls = calls
        self.freed = False

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        return False

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        self._calls -= 1
        assert self._calls >= 0, "used again"
        if not self._calls:
            raise RuntimeError("the model is broken")
        return [[1] * most for _ in answers]

    def free(self) -> None:
        self.freed = True


class Prompted(BlockDrafter):
    """Drafts blocks, and puts the right tokens in place of the first ones of every other block."""

    def __init__(self, target: str, architecture: str = DRAFT) -> None:
        super().__init__("a draft", tiny_draft(target, architecture=architecture))
        self._target = target
        self.asked: RequestSpec | None = None
        """The first request of a conversation."""
        self._count = 0

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        found = super().propose(answers, layers, most)
        self._count += 1
        if self._count % 2 or self.asked is None:
            return found
        return [self._righted(each.session, own) for each, own in zip(answers, found, strict=True)]

    def _righted(self, session: Session, own: Sequence[int]) -> Sequence[int]:
        assert self.asked is not None
        for each in reversed(turns(self._target, self.asked)[:2]):
            if session.recorded[: len(each.prompt)] == [*each.prompt]:
                coming = oracle_answer(self._target, each).tokens[len(session.recorded) - len(each.prompt) :][:2]
                return [*coming, *own[len(coming) :]][: len(own)]
        return own


class Noting(AssistantDrafter):
    """Notes how many tokens it drafted each time."""

    def __init__(self, assistant: Assistant) -> None:
        super().__init__("noting", assistant)
        self.lengths: list[int] = []

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        drafts = super().propose(answers, layers, most)
        self.lengths += map(len, drafts)
        return drafts


MODELS: dict[str, Callable[[str], DraftModel]] = {
    "itself": own_model,
    "a stranger": lambda _: Stranger(),
    "one that cannot draft": lambda _: Broken(3),
    "blocks": Prompted,
    "blocks, one draft after the other": lambda target: Prompted(target, DFLASH2),
}
ASSISTANTS: dict[str, Callable[[], Noting]] = {
    "every token": lambda: Noting(tiny_assistant()),
    "groups": lambda: Noting(tiny_assistant(groups=16, chosen=3)),
}


def tiny_head() -> Head:
    """A head with random weights for the tiny Qwen3-Next."""
    loaded = LoadedModel(cast("Module", tiny("qwen3_next").model))
    target = target_of(loaded)
    module = QwenHead.of_target(target.args, ["fc.weight", "layers.0.self_attn.q_proj.weight"])
    mx.random.seed(5)
    module.update(tree_map_with_path(spread, module.parameters()))  # type: ignore[no-untyped-call]
    mx.eval(list(parameters_of(module).values()))
    return Head(module, target)


TOGETHER: dict[str, tuple[str, Callable[[], DraftModel]]] = {
    "a head": ("qwen3_next", lambda: HeadDrafter(tiny_head())),
    "an assistant": ("gemma4", lambda: AssistantDrafter("an assistant", tiny_assistant())),
    "groups": ("gemma4", lambda: AssistantDrafter("an assistant", tiny_assistant(groups=16, chosen=3))),
    "blocks": ("llama", lambda: BlockDrafter("blocks", tiny_draft("llama"))),
    "blocks behind windows": ("gemma3", lambda: BlockDrafter("blocks", tiny_draft("gemma3"))),
    "blocks behind states": ("qwen3_next", lambda: BlockDrafter("blocks", tiny_draft("qwen3_next"))),
    "blocks of DFlash 2": ("llama", lambda: BlockDrafter("blocks", tiny_draft("llama", architecture=DFLASH2))),
    "blocks of DSpark": ("gemma3", lambda: BlockDrafter("blocks", tiny_draft("gemma3", architecture=DSPARK))),
    "itself": ("llama", lambda: own_model("llama")),
    "one with windows": ("llama", lambda: own_model("gemma3")),
    "one with states": ("gemma3", lambda: own_model("qwen3_next")),
    "one with lists of layers": ("llama", lambda: own_model("falcon_h1")),
}
"""Those that draft for several answers: their target, and what makes them."""


class Righted:
    """Drafts by a model, and puts in place of its drafts what a strategy makes of the tokens that will come."""

    def __init__(self, model: DraftModel, target: str, strategy: str, asked: Sequence[RequestSpec]) -> None:
        self.name, self.at_once, self.most_together = model.name, model.at_once, model.most_together
        self.most_bytes, self.watch = model.most_bytes, model.watch
        self.read_texts, self.free = model.read_texts, model.free
        self.proposed = list[int]()
        """The answers that each call drafted for."""
        self.own = list[tuple[list[int], Sequence[int]]]()
        """Texts, and the model's own drafts after them."""
        self._model, self._target, self._strategy, self._asked = model, target, STRATEGIES[strategy], asked
        self._numbers = random.Random(3)

    @property
    def nbytes(self) -> int:
        return self._model.nbytes

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        found = self._model.propose(answers, layers, most)
        self.proposed.append(sum(map(bool, found)))
        self.own += [([*each.session.recorded], own) for each, own in zip(answers, found, strict=True) if own]
        return [self._righted(each.session, own) for each, own in zip(answers, found, strict=True)]

    def _righted(self, session: Session, own: Sequence[int]) -> Sequence[int]:
        for each in self._asked if own else ():
            if session.recorded[: len(each.prompt)] == [*each.prompt]:
                coming = oracle_answer(self._target, each).tokens[len(session.recorded) - len(each.prompt) :]
                coming = [*coming, *[5] * len(own)][: min(len(own), self._strategy.most)]
                return self._strategy.make(coming, self._numbers)[: len(own)]
        return own


def finish(engine: TinyEngine) -> None:
    """Lets all answers come to their ends, and checks each against a plain loop."""
    engine.finish()
    for asked in engine.requests:
        asked.check_answer()
    engine.check_cache()


def rounds_together(engine: TinyEngine) -> int:
    """The rounds of several answers."""
    return sum(rows > 1 and length > 1 for rows, length in engine.forward.calls)
