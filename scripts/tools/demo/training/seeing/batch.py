"""Prompts with pictures as the text model is trained on them: several at once, where the runner has one.

What a prompt is made of, and how positions turn, is as in runner/media/prompt.py and runner/model/pictures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self, cast

import mlx.core as mx
from mlx_lm.models import qwen3_5

from runner.model.pictures.rope import AngledRope, Angles, angles


@dataclass
class Row:
    """One talk in tokens."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """1.0 for the tokens that the model has to say."""
    soft: list[int] = field(default_factory=list)
    """The feature that stands in a token's place, counted from 1 over all pictures of the row; 0 for none."""
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    features: list[mx.array] = field(default_factory=list)
    """Of each picture [soft tokens, width]."""
    _counter: int = 0

    def say(self, tokens: Sequence[int], *, counts: bool) -> None:
        """Adds a text."""
        self.tokens += tokens
        self.weights += [float(counts)] * len(tokens)
        self.soft += [0] * len(tokens)
        self.positions += [(self._counter + index,) * 3 for index in range(len(tokens))]
        self._counter += len(tokens)

    def show(self, soft: int, features: mx.array, rows: int, columns: int) -> None:
        """Adds the tokens of a picture of so many rows and columns; `soft` is their id."""
        count, first = rows * columns, 1 + sum(len(each) for each in self.features)
        self.tokens += [soft] * count
        self.weights += [0.0] * count
        self.soft += range(first, first + count)
        at = self._counter
        self.positions += [(at, at + index // columns, at + index % columns) for index in range(count)]
        self._counter += max(rows, columns)
        self.features.append(features)


class Batch(NamedTuple):
    """Rows, filled up behind their ends."""

    tokens: mx.array
    weights: mx.array
    soft: mx.array
    """[rows, length]; features are counted over all rows."""
    features: mx.array
    """Zeros, then the features of all rows [1 + count, width]."""
    positions: list[list[list[int]]]
    """[rows][3][length]"""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Returns the batch of at least one row with a picture."""
        length = max(len(row.tokens) for row in rows)
        width = next(each.shape[1] for row in rows for each in row.features)
        before, soft = 0, []
        for row in rows:
            soft.append([each and each + before for each in row.soft])
            before += sum(len(each) for each in row.features)

        def filled(values: Sequence[Sequence[float]], dtype: mx.Dtype) -> mx.array:
            return mx.array([[*each, *[0] * (length - len(each))] for each in values], dtype=dtype)

        turned = [[*row.positions, *[(0, 0, 0)] * (length - len(row.tokens))] for row in rows]
        return cls(
            filled([row.tokens for row in rows], mx.int32),
            filled([row.weights for row in rows], mx.float32),
            filled(soft, mx.int32),
            mx.concatenate([mx.zeros((1, width)), *(each for row in rows for each in row.features)]),
            [[[*channel] for channel in zip(*each, strict=True)] for each in turned],
        )


def logits(model: qwen3_5.Model, batch: Batch, sections: Sequence[int]) -> mx.array:
    """Returns the logits [rows, length, vocabulary]."""
    looked_up = model.model.embed_tokens(batch.tokens)
    embedded = mx.where(batch.soft[..., None] > 0, batch.features[batch.soft], looked_up)
    with _turned(model, batch.positions, sections):
        return cast("mx.array", model(batch.tokens, input_embeddings=embedded))


@contextmanager
def _turned(
    model: qwen3_5.Model, positions: Sequence[Sequence[Sequence[int]]], sections: Sequence[int]
) -> Iterator[None]:
    attentions = [each for _, each in model.named_modules() if "rope" in each]
    rope = attentions[0].rope
    rows = [angles(each, rope.dims, rope.base, sections) for each in positions]
    found = Angles(*(mx.stack([*part])[:, None] for part in zip(*rows, strict=True)))
    try:
        for attention in attentions:
            attention["rope"] = AngledRope(found)
        yield
    finally:
        for attention in attentions:
            attention["rope"] = rope
