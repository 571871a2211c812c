"""A package of mlx-vlm as a text model, and what is asked of it before it may serve."""

from collections.abc import Callable, Mapping
from functools import cached_property
from unittest.mock import patch

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.layer_interface import MakeLayers
from runner.commands.check.trial import batch_fault, draft_fault
from runner.engine.generation import Forward
from runner.model import OpenedModel
from runner.model.opened import open_checkpoint
from runner.model.sources.model_directory import open_directory
from runner.model.weights.loading import load
from runner.vlm.source import mlx_vlm_family
from scripts.tools.models import vlm
from scripts.tools.models.architectures import Values
from scripts.tools.models.tiny import VOCAB, Tiny
from tests.lib.driver import ask
from tests.model.architectures import caching
from tests.model.architectures.subject import TOKENS, Subject, run
from tests.model.architectures.talk import LEAST_TOKENS, PROMPT, started
from tests.model.cache.test_disk import same
from tests.vlm import oracle


class Package(Subject):
    """A package, built and written once for all questions."""

    @cached_property
    def module(self) -> Module:
        return vlm.make(self.name)

    @cached_property
    def tiny(self) -> Tiny:
        return vlm.tiny_of(self.name, self.module)

    @property
    def forward(self) -> tuple[MakeLayers, Forward]:
        """What makes its layers, and what computes with them."""
        return self.tiny.make_layers, self.tiny.logits

    @cached_property
    def config(self) -> Values:
        return {**vlm.config(self.name), "architectures": [f"{self.name}X"]}

    @cached_property
    def opened(self) -> OpenedModel:
        return open_checkpoint(open_directory(self.directory, self.name), family=mlx_vlm_family(self.name, self.config))

    @cached_property
    def expected(self) -> mx.array:
        """What mlx-vlm computes from the directory."""
        return oracle.logits(oracle.load(self.directory), TOKENS, [3, 5])[..., :VOCAB]


def loads_from_a_directory(it: Subject) -> None:
    """What mlx-vlm computes from it."""
    module = load(it.opened).module
    found = run(module)
    assert mx.isfinite(found).all()
    assert mx.abs(found - it.expected).max() <= 1e-4 * mx.abs(it.expected).max()


def what_comes_back_from_the_disk_is_right(it: Subject) -> None:
    """Bit for bit what the process had that wrote it. Layers of some classes are not taken back."""
    talk = it.talk
    assert talk.saved >= 0
    prompt = talk.asked[2][0]
    reader = started(it.tiny, talk.directory)
    with patch("runner.disk.segment_reader.WORTH_TOKENS", LEAST_TOKENS):
        restored = reader.restore(prompt)
    assert restored >= len(PROMPT) or it.name in NOT_KEPT
    if restored:
        same(ask(it.tiny, reader.cache, prompt, say=4, chunk=talk.chunk), talk.back)


NOT_KEPT = ("minimax_m3_vl", "zaya1_vl")
"""No file can describe their states: they are computed again after a restart."""

QUESTIONS: Mapping[Callable[[Subject], None], str] = {
    loads_from_a_directory: "it does not give mlx-vlm's own answers",
    caching.a_prompt_comes_back_from_the_cache: "its answers depend on how a prompt is divided",
    what_comes_back_from_the_disk_is_right: "its caches do not come back from disk as they were",
}
"""What is asked -> the reason to refuse a package that fails."""
ABILITIES = {"BATCHED": batch_fault, "DRAFTED": draft_fault}
