"""Recurrent scans against a loop in float64, over rules, shapes, masks, types and cuts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from runner.model.scans.kernel import Rule, scan

Numbers = np.ndarray[Any, np.dtype[Any]]


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
    for at, timed in enumerate(_timed(case.rule)):
        if timed:
            inputs[at] = mx.pad(inputs[at], [(0, 0)] * (inputs[at].ndim - 1) + [(1, 2)])[..., 1:-2]
    first = mx.array(normal(*state)).astype(mx.float32)
    mx.eval(inputs, first)
    return inputs, first, mask


def loop(rule: Rule, inputs: Sequence[Numbers], state: Numbers, mask: Numbers | None) -> tuple[Numbers, Numbers]:
    """Returns the outputs and the last state, token by token, as the rules say it."""
    values = dict(zip(rule.value.split(), inputs, strict=True))
    timed = {name: x for name, x in values.items() if name not in ("A", "D", "skip")}
    outputs = list[Numbers]()
    for t in range(inputs[0].shape[1]):
        x = {name: each[:, t] for name, each in timed.items()}
        for name in ("q", "k"):
            if name in x and "v" in x:
                x[name] = np.repeat(x[name], x["v"].shape[1] // x[name].shape[1], axis=1)
        match rule:
            case Rule.DECAY:
                after = x["g"][..., None, None] * state + _outer(x["beta"][..., None] * x["v"], x["k"])
                y = _times(after, x["q"]) + values["skip"][:, None] * x["v"]
            case Rule.DELTA:
                after = state * (x["g"][..., None, None] if x["g"].ndim == 2 else x["g"][..., None, :])
                after = after + _outer((x["v"] - _times(after, x["k"])) * x["beta"][..., None], x["k"])
                y = _times(after, x["q"])
            case Rule.WKV:
                after = state * x["w"][..., None, :] + _outer(x["v"], x["k"]) + _outer(_times(state, x["a"]), x["b"])
                y = _times(after, x["r"])
            case Rule.SELECTIVE:
                after = state * np.exp(x["dt"][..., None] * values["A"]) + _outer(x["dt"] * x["x"], x["B"])
                y = _times(after, x["C"]) + values["D"] * x["x"]
            case Rule.LINEAR:
                y = after = x["a"] * state + x["x"]
        seen = np.ones(len(y), bool) if mask is None else mask[:, t]
        outputs.append(np.where(seen.reshape(-1, *[1] * (y.ndim - 1)), y, 0))
        state = np.where(seen.reshape(-1, *[1] * (state.ndim - 1)), after, state)
    return np.stack(outputs, axis=1), state


def _outer(rows: Numbers, columns: Numbers) -> Numbers:
    return rows[..., None] * columns[..., None, :]


def _times(state: Numbers, columns: Numbers) -> Numbers:
    product: Numbers = np.einsum("...rc,...c->...r", state, columns)
    return product


def cuts_of(tokens: int) -> Sequence[int]:
    """Returns where to cut a prompt: in an uneven place, and before the last token."""
    return sorted({0, tokens // 3, tokens - 1, tokens})


def in_parts(case: Case, cuts: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Returns the outputs of a prompt that is cut at these places, and the last state."""
    inputs, state, mask = made(case)
    outputs = list[mx.array]()
    for start, stop in pairwise(cuts):
        part = [x[:, start:stop] if timed else x for x, timed in zip(inputs, _timed(case.rule), strict=True)]
        y, state = scan(case.rule, part, state, None if mask is None else mask[:, start:stop])
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def one_text(case: Case, text: int) -> tuple[mx.array, mx.array]:
    """Returns the outputs and the last state of one text alone."""
    inputs, state, mask = made(case)
    own = slice(text, text + 1)
    part = [x[own] if timed else x for x, timed in zip(inputs, _timed(case.rule), strict=True)]
    return scan(case.rule, part, state[own], None if mask is None else mask[own])


def _timed(rule: Rule) -> Iterator[bool]:
    return (name not in ("A", "D", "skip") for name in rule.value.split())


def distance(case: Case, found: tuple[mx.array, mx.array]) -> float:
    """Returns the largest difference from the loop in float64, in units of the rounding of the outputs."""
    inputs, state, mask = made(case)
    exact = [np.array(x.astype(mx.float32)).astype(np.float64) for x in (*inputs, state)]
    wanted = loop(case.rule, exact[:-1], exact[-1], None if mask is None else np.array(mask))
    epsilons = mx.finfo(case.dtype).eps, mx.finfo(mx.float32).eps
    return max(
        float(np.abs(np.array(mine.astype(mx.float32)) - theirs).max() / (np.abs(theirs).max() * epsilon))
        for mine, theirs, epsilon in zip(found, wanted, epsilons, strict=True)
    )
