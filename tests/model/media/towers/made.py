"""Towers made of a case's weights without files, and what they compute."""

from collections.abc import Iterator, Mapping

import mlx.core as mx

from runner.media.towers.nemotron_h import NemotronTower
from runner.media.towers.qwen3_5 import Qwen35Tower
from runner.media.towers.tower import Tower
from tests.model.media.towers.cases import Case


def kind(case: Case) -> type[Tower]:
    return Qwen35Tower if case.name.startswith("qwen") else NemotronTower


def made(case: Case, weights: Mapping[str, mx.array] | None = None) -> Tower:
    """The tower of a case, with the published tensors `weights` instead of its own if given."""
    tower = kind(case)(case.config)
    found = case.weights if weights is None else weights
    named = {name: array for key, array in found.items() if (name := tower.parameter_name(key)) is not None}
    tower.load_weights(list(tower.sanitize(named).items()))
    return tower


def encoded(tower: Tower, case: Case) -> Iterator[mx.array]:
    """Yields each part of a tower's work on the picture of a case, evaluated."""
    for step in tower.encode(case.patches, case.grid):
        mx.eval(step)
        yield step


def features(tower: Tower, case: Case) -> mx.array:
    return list(encoded(tower, case))[-1]
