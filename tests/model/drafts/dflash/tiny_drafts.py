"""Drafts with random weights for the tiny models of the engine's tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.drafts.dflash.dflash_config import read_dflash_config
from runner.drafts.dflash.drafter import (
    BlockContext,
    BlockDraft,
    BlockDrafter,
    BlockText,
    DFlashModule,
    OptionalTensors,
)
from runner.drafts.dflash.fitting import block_target
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.target import Draw, Tap
from runner.model.weights.loading import LoadedModel
from runner.model.weights.parameters import parameters_of
from scripts.tools.models.dflash import DRAFT, dflash_config
from scripts.tools.models.tiny import VOCAB, tiny
from tests.model.drafts.answers import greedy

CHANGES: dict[str, object] = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCAB}


def tiny_draft(kind: str, changes: Mapping[str, object] | None = None, architecture: str = DRAFT) -> BlockDraft:
    """A draft for the tiny model of a kind."""
    config = read_dflash_config(dflash_config(architecture, {**CHANGES, **(changes or {})}), architecture)
    mx.random.seed(1)
    module = DFlashModule(config, OptionalTensors(gates=False, tap_norms=False, biases=False))
    found = parameters_of(module).items()
    drawn = [(name, mx.random.normal(array.shape)) for name, array in found if array.ndim == 3]
    module.load_weights([(name, array * 2 if array.ndim == 2 else array) for name, array in found])
    module.load_weights(drawn, strict=False)
    mx.eval(list(parameters_of(module).values()))
    return BlockDraft(config, module, block_target(config, tiny_target(kind)))


def tiny_target(kind: str) -> LoadedModel:
    return LoadedModel(cast("Module", tiny(kind).model))


def from_scratch(draft: BlockDraft, loaded: LoadedModel, text: Sequence[int], count: int) -> mx.array:
    """The logits [count, V] of the best tokens behind a text, by one forward over all of it."""
    tap = Tap(draft.tapped, len(text))
    _, features = tap.observe(lambda: loaded.logits(mx.array([text[:-1]]), loaded.make_layers()))
    assert features is not None
    context = BlockContext(draft.make_layers(1), [0])
    draft.module.remember(features, context)
    found = list[mx.array]()

    def draw(logits: mx.array) -> mx.array:
        found.append(logits)
        return greedy(logits)

    draft.draft(text[-1:], count, context, draw)
    return mx.concatenate(found)


Coming = Callable[[Sequence[int]], Sequence[int]]
"""Maps the tokens of a text to those that will come."""


class Prompted(BlockDrafter):
    """Drafts what it does, and puts tokens that are right in place of the first two of every other draft."""

    def __init__(self, draft: BlockDraft, coming: Coming, **bounds: int) -> None:
        super().__init__("a draft", draft, **bounds)
        self.logits: list[mx.array] = []
        """Those of the present draft, [1, V] each."""
        self._count = 0
        self._coming = coming

    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[BlockText],
        layers: Sequence[object],
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        (answer,) = answers
        self.logits = []
        self._count += 1

        def noted(logits: mx.array) -> mx.array:
            self.logits.append(logits)
            return draw(logits)

        ((*own,),) = super().draft(answers, texts, layers, most, noted)
        right = [*self._coming(answer.session.recorded)[:2]] if self._count % 2 else []
        return [[*right, *own[len(right) :]][: len(own)]]
