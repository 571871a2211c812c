"""Models as they compute: scans and architectures, compared with the same computed in another way, and their speed."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import cast
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_map_with_path

from runner.cache.layers.compiled import CompiledSteps, Forward
from runner.device import device
from runner.model.scans import functions
from runner.model.scans.kernel import Rule, available
from scripts.tools.bench import family_models
from scripts.tools.device.parts import Row, guarded
from scripts.tools.device.scans import LARGE, SMALL, Case, cuts_of, distance, in_parts, one_text
from scripts.tools.models import architectures, nodes
from scripts.tools.models.tiny import Tiny, words

_FEW = "llama", "qwen3_next", "kimi_linear", "mamba2", "mamba", "rwkv7", "recurrent_gemma", "bailing_moe_linear"
_ROUNDINGS = 4.0  # of a scan's outputs
_NOISE = 1e-2  # of the largest logit
_PROMPT, _TOKENS = 60, 100
_TIMED = "llama", "qwen3_5", "mamba2", "kimi_linear"


def scan_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields a row for each scan. `tiny` chooses, here as below, what a CPU does in seconds."""
    if missing := [rule.name for rule in Rule if not available(rule)]:
        yield Row("kernels", f"none for {', '.join(missing)}", good=False)
        return
    yield from guarded(lambda case: [scan_row(case)], SMALL if tiny else LARGE)


def graph_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields the rows of all architectures, those with scans first."""
    others = () if tiny else architectures.architectures()
    served = [name for name in dict.fromkeys((*_FEW, *others)) if name not in architectures.unserved()]
    yield from guarded(architecture_rows, served)


def scan_row(case: Case) -> Row:
    """Compares a scan with the loop in float64, with itself in parts, and with texts alone: to the last bit."""
    whole = in_parts(case, [0, case.tokens])
    mx.eval(whole)
    ms = timed(lambda: in_parts(case, [0, case.tokens]))
    away = distance(case, whole)
    equal = _equal(whole, in_parts(case, cuts_of(case.tokens)))
    alone = one_text(case, case.texts - 1)
    equal &= _equal([each[-1:] for each in whole], alone)
    found = f"{away:.1f} roundings away, {ms:.2f} ms{'' if equal else ', DIFFERENT bits in parts or rows'}"
    return Row(str(case), found, away < _ROUNDINGS and equal, {"roundings": away, "ms": ms})


def _equal(mine: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    return all(bool(mx.array_equal(*pair)) for pair in zip(mine, theirs, strict=True))


def architecture_rows(name: str) -> Iterator[Row]:
    """Yields a row if the graphs of an architecture grow, and one for its scans if it has any."""
    tiny = architectures.build(name)
    few, many = nodes.count(tiny)
    if many > few:
        yield Row(name, f"{few} nodes for {nodes.LENGTHS[0]} tokens, {many} for {nodes.LENGTHS[1]}", good=False)
    with patch.object(functions, "scan", wraps=vars(functions)["scan"]) as scan:
        whole = _logits(tiny, [24])
    if not scan.called:
        return
    with patch.object(functions, "available", lambda *_, **__: False):
        theirs = _logits(tiny, [24])
    away = [_apart(each, theirs) for each in (whole, _logits(tiny, [8, 15, 1]))]
    yield Row(name, "{:.0e} from mlx-lm's loop, {:.0e} in parts".format(*away), max(away) < _NOISE)


def _logits(tiny: Tiny, lengths: Sequence[int]) -> mx.array:
    """Returns the logits of a prompt that is read in pieces of these lengths."""
    layers, tokens, found = tiny.make_layers(), words(sum(lengths)), list[mx.array]()
    for length in lengths:
        found.append(tiny.logits(mx.array([tokens[:length]]), layers))
        mx.eval(found[-1])
        tokens = tokens[length:]
    return mx.concatenate(found, axis=1)


def _apart(mine: mx.array, theirs: mx.array) -> float:
    return float(mx.abs(mine - theirs).max() / mx.abs(theirs).max())


def hybrid_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields the times of models, and those with mlx-lm's own loops."""
    length, base = 32 if tiny else 1_024 if device() == "gpu" else 128, 0.0
    for name in ("llama",) if tiny else _TIMED:
        tested, size = (architectures.build(name), 1) if tiny else large(name)
        prompt, token = _speed(tested, length)
        with patch.object(functions, "available", lambda *_, **__: False):
            theirs, token_theirs = _speed(tested, length // 4, 1)
        base = base or prompt / size
        times = f"{length} tokens {prompt:.1f} ms, one more {token:.2f}"
        loops = f"by mlx-lm's loops {length // 4} tokens {theirs:.1f} ms, one more {token_theirs:.2f}"
        of_llama = prompt / size / base
        figures = {"prompt_ms": prompt, "token_ms": token, "loops_ms": [theirs, token_theirs], "of_llama": of_llama}
        found = f"{times}; {loops}; {of_llama:.2f} of a llama's for each parameter"
        yield Row(f"{name}, {size / 1e6:.0f} M", found, figures=figures)


def compiled_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields the time of a token by plain and by compiled steps, and where their answers part."""
    for name in ("qwen3_5",) if tiny else _TIMED:
        tested = architectures.build(name) if tiny else large(name)[0]
        steps = CompiledSteps(tested.logits, tested.logits)
        (plain, plain_ms), (compiled, ms) = (_answer(each, tested.make_layers()) for each in (tested.logits, steps))
        apart = next((at for at, pair in enumerate(zip(plain, compiled, strict=True)) if pair[0] != pair[1]), None)
        found = (
            f"{plain_ms:.2f} ms a token, compiled {ms:.2f}, {'equal' if apart is None else f'token {apart} differs'}"
        )
        good = steps.ran > _TOKENS // 2 and (apart is None or device() == "gpu")
        yield Row(name, found, good, {"plain_ms": plain_ms, "compiled_ms": ms, "steps": steps.ran})


def _answer(forward: Forward, layers: list[object]) -> tuple[list[int], float]:
    """Returns a greedy answer, and the milliseconds of a token."""
    logits, tokens = forward(mx.array([words(_PROMPT)]), layers), list[int]()

    def step() -> list[mx.array]:
        nonlocal logits
        drawn = mx.argmax(logits[:, -1:], axis=-1)
        tokens.append(cast("int", drawn.item()))
        logits = forward(drawn, layers)
        return [logits]

    return tokens, timed(step, _TOKENS)


def large(family: str) -> tuple[Tiny, int]:
    """Returns a model of about 100 million parameters, on a GPU in bfloat16, and the number of the active ones."""
    mx.random.seed(7)
    model, size = family_models.build(family)
    model.update(tree_map_with_path(architectures.weight, model.parameters()))
    if device() == "gpu":
        model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(model.parameters())
    return architectures.tiny_of(family, model), size.active


def _speed(tested: Tiny, length: int, times: int = 3) -> tuple[float, float]:
    """Returns the milliseconds for a prompt and for one token more."""
    layers = tested.make_layers()
    prompt, token = mx.array([words(length)]), mx.array([[1]])
    mx.eval(tested.logits(prompt, layers))
    prompt_ms = timed(lambda: [tested.logits(prompt, tested.make_layers())], times)
    return prompt_ms, timed(lambda: [tested.logits(token, layers)])


def timed(function: Callable[[], Sequence[mx.array]], times: int = 3) -> float:
    """Returns the median of the milliseconds that `function` and its arrays take."""
    found = list[float]()
    for _ in range(times):
        begin = time.perf_counter()
        mx.eval(function())
        found.append((time.perf_counter() - begin) * 1e3)
    return median(found)
