"""The first part of the training: the tower learns what stands where, without a text model.

A linear layer reads colour and place off each soft token that the circle covers, and that there is nothing off
the others. From answers alone a tower of this size takes far longer to find out what it is good for.
"""

import random
import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad

from runner.model.towers import Grid
from runner.model.towers.qwen3_5 import Qwen35Tower
from scripts.tools.demo.seeing.world import COLOURS, PLACES
from scripts.tools.demo.training.directory import named_weights
from scripts.tools.demo.training.seeing.gallery import Exhibit
from scripts.tools.demo.training.seeing.initial import set_weights

_BATCH = 16
_COVERED = 0.15
"""The least share of a soft token that counts as covered."""
_COLOURS, _PLACES = list(COLOURS), list(PLACES)
_PEAK_RATE = 3e-3
_REPORT_STEPS = 50


class _Reader(Module):
    def __init__(self, tower: Qwen35Tower) -> None:
        Module.__init__(self)
        self.tower = tower
        self.read = Linear(tower.width, 1 + len(_COLOURS) + len(_PLACES))

    def __call__(self, patches: mx.array, grid: Grid) -> list[mx.array]:
        """Returns the logits [pictures, soft tokens, n] of nothing and all colours, and of places."""
        read, end = self.read(features(self.tower, patches, grid)), 1 + len(_COLOURS)
        return [read[..., :end], read[..., end:]]


def features(tower: Qwen35Tower, patches: mx.array, grid: Grid) -> mx.array:
    """Returns the features [pictures, soft tokens, width] of pictures of one form [pictures, count, values]."""
    return mx.vmap(lambda each: [*tower.encode(each, grid)][-1])(patches)


def train_tower(tower: Qwen35Tower, exhibits: Sequence[Exhibit], steps: int, seed: int) -> None:
    """Trains the weights of `tower` in place."""
    mx.random.seed(seed)
    reader = _Reader(tower)
    set_weights(tower, seed)
    rate = optimizers.join_schedules(
        [
            optimizers.linear_schedule(1e-4, _PEAK_RATE, 20),
            optimizers.cosine_decay(_PEAK_RATE, max(1, steps - 20), 5e-5),
        ],
        [20],
    )
    optimizer = optimizers.AdamW(learning_rate=rate, betas=[0.9, 0.95], weight_decay=0.01)
    loss_and_gradients = value_and_grad(reader, _loss)
    started, average = time.monotonic(), np.zeros(3)
    for step, batch in zip(range(1, steps + 1), _batches(exhibits, seed), strict=False):
        (loss, right), gradients = loss_and_gradients(reader, batch)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(reader, gradients)
        mx.eval(loss, right, named_weights(reader), optimizer.state)
        average += (np.array([loss.item(), *right.tolist()]) - average) * (1 if step == 1 else 0.05)
        if step % _REPORT_STEPS == 0 or step == steps:
            rights = ", ".join(
                f"{name} {share:.0%}" for name, share in zip(("colour", "place"), average[1:], strict=True)
            )
            print(
                f"tower, step {step} of {steps}, {time.monotonic() - started:.0f} s: loss {average[0]:.3f}, {rights}",
                flush=True,
            )


def _batches(exhibits: Sequence[Exhibit], seed: int) -> Iterator[list[Exhibit]]:
    """Yields pictures of one form each time."""
    rng = random.Random(seed)
    forms: dict[Grid, list[Exhibit]] = {}
    for each in exhibits:
        forms.setdefault(each.grid, []).append(each)
    while True:
        form = forms[rng.choice(exhibits).grid]
        yield rng.sample(form, min(_BATCH, len(form)))


def _loss(reader: _Reader, batch: Sequence[Exhibit]) -> tuple[mx.array, mx.array]:
    """Returns the mean cross entropy, and the shares of covered soft tokens that are read right."""
    logits = reader(mx.stack([each.patches for each in batch]), batch[0].grid)
    covered = mx.array(np.stack([each.covered for each in batch]) > _COVERED)
    wanted = (
        [_COLOURS.index(each.scene.colour) + 1 for each in batch],
        [_PLACES.index(each.scene.place) for each in batch],
    )
    colours, *_ = logits
    total = (cross_entropy(colours, mx.zeros(covered.shape, mx.int32)) * ~covered).sum() / (~covered).sum()
    right = []
    for found, index in zip(logits, wanted, strict=True):
        labels = mx.broadcast_to(mx.array(index)[:, None], covered.shape)
        total = total + (cross_entropy(found, labels) * covered).sum() / covered.sum()
        right.append(((mx.argmax(found, axis=-1) == labels) & covered).sum() / covered.sum())
    return total, mx.stack(right)
