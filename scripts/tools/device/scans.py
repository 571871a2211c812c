"""Recurrent scans against a loop in float64, over rules, shapes, masks, types and cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from runner.model.scans.kernel import Rule, scan

Numbers = np.ndarray[Any, np.dtype[Any]]
ALL = slice(None)


@dataclass(frozen=True)
class Case:
    """The shapes of a scan, with `keys` heads of keys for `heads` heads of values. `gates` gives each column a gate."""

    rule: Rule
    tokens: int
    columns: int
    rows: int = 5
    texts: int = 1
    heads: int = 1
    keys: int = 1
    masked: bool = False
    gates: bool = False
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        words = "masked " * self.masked + "gates " * self.gates + str(self.dtype).removeprefix("mlx.core.")
        heads = f"{self.keys}/{self.heads} heads of " if self.heads > 1 else ""
        return f"{self.rule.name} {self.texts} x {self.tokens} tokens, {heads}{self.rows} x {self.columns}, {words}"


SMALL = (
    Case(Rule.DECAY, 7, 64, texts=2, heads=4, keys=2),
    Case(Rule.DECAY, 1, 16, rows=8, heads=3, keys=3, dtype=mx.bfloat16),
    Case(Rule.DELTA, 7, 40, rows=9, texts=2, heads=4, keys=2, masked=True),
    Case(Rule.DELTA, 5, 128, rows=3, heads=2, keys=1),
    Case(Rule.DELTA, 6, 32, rows=4, texts=2, heads=2, keys=2, gates=True, masked=True),
    Case(Rule.DELTA, 4, 12, rows=4, heads=2, keys=2, dtype=mx.bfloat16),
    Case(Rule.DELTA, 3, 300, rows=2),
    Case(Rule.WKV, 6, 64, rows=3, texts=2, heads=2, keys=2),
    Case(Rule.SELECTIVE, 6, 16, rows=37, texts=2, masked=True),
    Case(Rule.SELECTIVE, 1, 5, rows=33),
    Case(Rule.LINEAR, 6, 1, rows=70, texts=3, masked=True),
)
"""For a few seconds of a CPU."""
LARGE = (
    *SMALL,
    Case(Rule.DELTA, 4_099, 128, 128, heads=8, keys=4),
    Case(Rule.DELTA, 1_025, 128, 128, heads=32, keys=16, dtype=mx.bfloat16),
    Case(Rule.DELTA, 129, 128, 128, texts=4, heads=32, keys=32, gates=True, masked=True, dtype=mx.bfloat16),
    Case(Rule.DELTA, 300, 64, 256, texts=2, heads=8, keys=2, dtype=mx.float16),
    Case(Rule.DECAY, 2_049, 128, 64, texts=2, heads=16, keys=2, masked=True, dtype=mx.bfloat16),
    Case(Rule.DECAY, 1, 128, 64, texts=16, heads=80, keys=1),
    Case(Rule.WKV, 1_025, 64, 64, texts=2, heads=40, keys=40, dtype=mx.bfloat16),
    Case(Rule.SELECTIVE, 1_025, 16, 5_120, texts=2, dtype=mx.bfloat16),
    Case(Rule.LINEAR, 2_049, 1, 4_096, texts=3),
)
"""The sizes of models, for a GPU."""


@lru_cache(maxsize=1)
def made(case: Case) -> tuple[list[mx.array], mx.array, mx.array | None]:
    """Returns inputs, the state, and a mask or None. Inputs with tokens are slices of wider rows, as in models."""
    draw = np.random.default_rng(case.tokens + case.columns)
    b, t, h, k, r, c = case.texts, case.tokens, case.heads, case.keys, case.rows, case.columns

    def normal(*shape: int) -> Numbers:
        return draw.standard_normal(shape)

    def between(low: float, high: float, *shape: int) -> Numbers:
        return draw.uniform(low, high, shape)

    def unit(*shape: int) -> Numbers:
        x = normal(*shape)
        lengths: Numbers = np.linalg.norm(x, axis=-1, keepdims=True)
        return x / lengths

    keyed, valued, gate = (b, t, k, c), (b, t, h, r), (b, t, h, c) if case.gates else (b, t, h)
    state: tuple[int, ...] = (b, h, r, c)
    match case.rule:
        case Rule.DECAY:
            arrays = [unit(*keyed), unit(*keyed), normal(*valued), between(0.5, 1, b, t, h), between(0, 2, b, t, h)]
            arrays.append(normal(h))
        case Rule.DELTA:
            arrays = [unit(*keyed), unit(*keyed), normal(*valued), between(0.5, 1, *gate), between(0, 2, b, t, h)]
        case Rule.WKV:
            a = unit(b, t, h, c)
            vectors = unit(b, t, h, c), between(0.5, 1, b, t, h, c), unit(b, t, h, c), normal(*valued)
            arrays = [*vectors, -a, a * between(0, 1, b, t, h, c)]
        case Rule.SELECTIVE:
            arrays = [normal(b, t, r), between(0, 0.5, b, t, r), -between(0.1, 4, r, c), normal(b, t, c)]
            arrays += [normal(b, t, c), normal(r)]
            state = (b, r, c)
        case Rule.LINEAR:
            arrays, state = [normal(b, t, r), between(0.5, 1, b, t, r)], (b, r)
    mask = mx.array(draw.random((b, t)) < 0.7) if case.masked else None
    inputs = [mx.array(x).astype(case.dtype) for x in arrays]
    inputs = [mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)])[..., 1:-2] if x.ndim > 2 else x for x in inputs]
    first = mx.array(normal(*state)).astype(mx.float32)
    mx.eval(inputs, first)
    return inputs, first, mask


def loop(rule: Rule, inputs: Sequence[mx.array], state: mx.array, mask: mx.array | None) -> tuple[Numbers, Numbers]:
    """Returns the outputs and the last state, computed in float64 and token by token, as the rules say it."""
    arrays, s, outputs = dict(zip(rule.value.split(), map(_wide, inputs), strict=True)), _wide(state), list[Numbers]()
    for t in range(inputs[0].shape[1]):
        at = SimpleNamespace(**{name: x[:, t] if x.ndim > 2 else x for name, x in arrays.items()})
        if rule in (Rule.DECAY, Rule.DELTA):
            at.q, at.k = (np.repeat(x, s.shape[1] // x.shape[1], axis=1) for x in (at.q, at.k))
            decayed = s * (at.g[..., None, None] if at.g.ndim == 2 else at.g[..., None, :])
        match rule:
            case Rule.DECAY:
                after = decayed + _outer(at.beta[..., None] * at.v, at.k)
                y = _times(after, at.q) + at.skip[:, None] * at.v
            case Rule.DELTA:
                after = decayed + _outer((at.v - _times(decayed, at.k)) * at.beta[..., None], at.k)
                y = _times(after, at.q)
            case Rule.WKV:
                after = s * at.w[..., None, :] + _outer(at.v, at.k) + _outer(_times(s, at.a), at.b)
                y = _times(after, at.r)
            case Rule.SELECTIVE:
                after = s * np.exp(at.dt[..., None] * at.A) + _outer(at.dt * at.x, at.B)
                y = _times(after, at.C) + at.D * at.x
            case Rule.LINEAR:
                y = after = at.a * s + at.x
        seen = np.ones(len(y), bool) if mask is None else np.array(mask[:, t])
        outputs.append(np.where(seen.reshape(-1, *[1] * (y.ndim - 1)), y, 0))
        s = np.where(seen.reshape(-1, *[1] * (s.ndim - 1)), after, s)
    return np.stack(outputs, axis=1), s


def _wide(x: mx.array) -> Numbers:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _outer(rows: Numbers, columns: Numbers) -> Numbers:
    return rows[..., None] * columns[..., None, :]


def _times(state: Numbers, columns: Numbers) -> Numbers:
    product: Numbers = np.einsum("...rc,...c->...r", state, columns)
    return product


def cuts_of(tokens: int) -> Sequence[int]:
    """Returns where to cut a prompt: in an uneven place, and before the last token."""
    return sorted({0, tokens // 3, tokens - 1, tokens})


def in_parts(case: Case, cuts: Sequence[int], texts: slice = ALL) -> tuple[mx.array, mx.array]:
    """Returns the outputs of prompts that are cut at these places, and the last states, of some of the texts."""
    inputs, state, mask = made(case)
    state, outputs = state[texts], list[mx.array]()
    for start, stop in pairwise(cuts):
        tokens = slice(start, stop)
        masked = None if mask is None else mask[texts, tokens]
        y, state = scan(case.rule, part(inputs, texts, tokens), state, masked)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def part(inputs: Sequence[mx.array], texts: slice, tokens: slice) -> list[mx.array]:
    """Returns the inputs for some texts and some tokens. Inputs of two axes or one hold for all."""
    return [x[texts, tokens] if x.ndim > 2 else x for x in inputs]


def one_text(case: Case, text: int) -> tuple[mx.array, mx.array]:
    """Returns the outputs and the last state of one text alone."""
    return in_parts(case, [0, case.tokens], slice(text, text + 1))


def distance(case: Case, found: tuple[mx.array, mx.array]) -> float:
    """Returns the largest difference from the loop in float64, in units of the rounding of the outputs."""
    inputs, state, mask = made(case)
    epsilons = mx.finfo(case.dtype).eps, mx.finfo(mx.float32).eps
    return max(
        float(np.abs(_wide(mine) - theirs).max() / (np.abs(theirs).max() * epsilon))
        for mine, theirs, epsilon in zip(found, loop(case.rule, inputs, state, mask), epsilons, strict=True)
    )
