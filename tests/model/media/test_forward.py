"""Prompts with pictures give the logits of a dense computation, in whatever pieces they are computed."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from typing import cast

import mlx.core as mx
import pytest

from runner.media.forward import FeatureRows, MediaForward
from tests.lib.seeing import (
    BOTH_WAYS,
    MROPE,
    NAMES,
    PROMPTS,
    SOFT,
    Parts,
    Seeing,
    Shown,
    places_of,
    seeing,
    tokens_of,
    walk,
    words,
)
from tests.model.media import dense
from tests.model.media.record import GEMMA, PARTS, QWEN, RECORDED

TOLERANCE = 3e-5
"""Rounding depends on the processor: prompts without a picture, cut at every token, are off by up to 6e-6, Gemma 4's
with one by 1.3e-5."""
MATTERS = 1e-3


@cache
def wanted(name: str, prompt: str) -> mx.array:
    return dense.logits(name, PROMPTS[prompt])


def away(found: mx.array, right: mx.array) -> float:
    assert found.shape == right.shape
    return cast("float", (mx.abs(found - right).max() / mx.abs(right).max()).item())


def compute(
    name: str, parts: Parts, stops: Sequence[int], layers: list[object] | None = None, *, soft: int = SOFT
) -> mx.array:
    """Returns the logits [L, V] of a prompt that is computed up to each of `stops` in turn."""
    model = seeing(name)
    layers = model.loaded.make_layers() if layers is None else layers
    ids = [soft if token == SOFT else token for token in tokens_of(parts)]
    found = [
        piece(model, ids, parts, start, stop, layers, channels=name in MROPE) for start, stop in pairwise((0, *stops))
    ]
    return mx.concatenate(found, axis=1)[0]


def piece(
    model: Seeing, ids: Sequence[int], parts: Parts, start: int, stop: int, layers: list[object], *, channels: bool
) -> mx.array:
    rows = []
    for place in places_of(parts):
        first, last = max(start, place.start), min(stop, place.stop)
        if first < last:
            features = place.shown.features()[first - place.start : last - place.start]
            rows.append(FeatureRows(first - start, last - start, features))
    channel = [list(each) for each in zip(*walk(parts)[start:stop], strict=True)] if channels else None
    logits = model.forward()(ids[start:stop], layers, rows, channel, model.loaded.logits)
    mx.eval(logits)
    return logits


def rows_of(parts: Parts) -> list[FeatureRows]:
    return [FeatureRows(place.start, place.stop, place.shown.features()) for place in places_of(parts)]


def cuts_of(name: str, parts: Parts) -> list[list[int]]:
    """Returns ways to cut a prompt: not at all, and where a family allows it, inside of pictures too."""
    length = len(tokens_of(parts))
    ways = [list(range(size, length, size)) for size in (1, 7)]
    edges = sorted({edge + by for place in places_of(parts) for edge in place[:2] for by in (-1, 0, 1)})
    ways += [edges, *([edge] for edge in edges)]
    inside = {at for place in places_of(parts) if name in BOTH_WAYS for at in range(place.start + 1, place.stop)}
    chosen = [[at for at in way if 0 < at < length and at not in inside] for way in ways]
    return [[length], *([*way, length] for way in chosen if way)]


@pytest.mark.parametrize(
    ("name", "prompt"), [case for turn, case in enumerate(product(NAMES, PROMPTS)) if (turn + turn // len(PROMPTS)) % 2]
)
def test_any_cuts_give_the_same(name: str, prompt: str) -> None:
    for stops in cuts_of(name, PROMPTS[prompt]):
        assert away(compute(name, PROMPTS[prompt], stops), wanted(name, prompt)) <= TOLERANCE, f"cut at {stops}"


@pytest.mark.parametrize("name", NAMES)
def test_the_id_of_a_soft_token_means_nothing(name: str) -> None:
    parts = PROMPTS["two"]
    length = len(tokens_of(parts))
    for soft in (-1, 0, 5, 1 << 20):  # the keys of caches, and ids beyond the table
        assert away(compute(name, parts, [length], soft=soft), wanted(name, "two")) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_matters_and_so_does_all_that_is_made_of_it(name: str) -> None:
    parts = PROMPTS["one"]
    length = len(tokens_of(parts))
    right = wanted(name, "one")[-1]
    other = [part._replace(seed=9) if isinstance(part, Shown) else part for part in parts]
    assert away(compute(name, other, [length])[-1], right) > MATTERS
    model = seeing(name)
    rows = rows_of(parts)
    ids = tokens_of(parts)
    if name in MROPE:
        plain = model.forward()(ids, model.loaded.make_layers(), rows, None, model.loaded.logits)[0, -1]
        assert away(plain, right) > MATTERS
    if name in BOTH_WAYS:
        causal = MediaForward(model.loaded.module)(ids, model.loaded.make_layers(), rows, None, model.loaded.logits)
        assert away(causal[0, -1], right) > MATTERS


@pytest.mark.parametrize("prompt", ["two", "behind a window"])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_goes_on_behind_pictures(name: str, prompt: str) -> None:
    parts, answer = PROMPTS[prompt], words(4, 8)
    model, layers = seeing(name), seeing(name).loaded.make_layers()
    length = len(tokens_of(parts))
    compute(name, parts, [length], layers)
    shift = walk(parts, 1)[-1][0] - length if name in MROPE else 0
    assert shift <= 0
    forward = model.forward()
    with forward.shifted([shift]):
        steps = [model.loaded.logits(mx.array([[token]]), layers)[0] for token in answer[:3]]
    found = mx.concatenate(steps)
    right = dense.logits(name, [*parts, answer[:3]])
    assert away(found, right[length:]) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stays_behind_in_the_model(name: str) -> None:
    model = seeing(name)
    before = [(path, id(each), sorted(each)) for path, each in model.loaded.module.named_modules()]
    text = mx.array([words(20)])
    right = model.loaded.logits(text, model.loaded.make_layers())
    mx.eval(right)
    forward, parts = model.forward(), PROMPTS["one"]
    for broken in (False, True):

        def run(tokens: mx.array, layers: list[object], broken: bool = broken) -> mx.array:
            if broken:
                raise MemoryError("on purpose")
            return model.loaded.logits(tokens, layers)

        rows = rows_of(parts)
        positions = [list(each) for each in zip(*walk(parts), strict=True)] if name in MROPE else None
        layers = model.loaded.make_layers()
        if broken:
            with pytest.raises(MemoryError):
                forward(tokens_of(parts), layers, rows, positions, run)
            with pytest.raises(MemoryError), forward.shifted([-3 if name in MROPE else 0]):
                run(text, layers)
        else:
            forward(tokens_of(parts), layers, rows, positions, run)
        assert all("make_mask" not in vars(layer) for layer in layers)
        assert [(path, id(each), sorted(each)) for path, each in model.loaded.module.named_modules()] == before
    assert mx.array_equal(model.loaded.logits(text, model.loaded.make_layers()), right)


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_the_dense_computation_gives_the_logits_of_mlx_vlm(name: str) -> None:
    """They were recorded."""
    wanted = cast("dict[str, mx.array]", mx.load(str(RECORDED)))[name]
    assert away(dense.logits(name, PARTS), wanted) <= TOLERANCE
    assert away(compute(name, PARTS, [len(tokens_of(PARTS))]), wanted) <= TOLERANCE
