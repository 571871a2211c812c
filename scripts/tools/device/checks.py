"""Models as they compute: scans and architectures, compared with the same computed in another way, and their speed."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_map_with_path

from runner.cache.layers import rows as batch_buffers
from runner.cache.layers.batched import BatchedLayers
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
_BATCH = 4
_TIMED = "llama", "qwen3_5", "mamba2", "kimi_linear"


def scan_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields a row for each scan. `tiny` chooses, here as below, what a CPU does in seconds."""
    if missing := [rule.name for rule in Rule if not available(rule)]:
        yield Row("kernels", f"none for {', '.join(missing)}", good=False)
        return
    yield from guarded(lambda case: [scan_row(case)], SMALL if tiny else LARGE)
    yield own_delta_row()


def graph_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields the rows of all architectures, those with scans first."""
    others = () if tiny else architectures.architectures()
    served = [name for name in dict.fromkeys((*_FEW, *others)) if name not in architectures.unserved()]
    yield from guarded(architecture_rows, served)


def hybrid_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields times of the attention of one query, of batches, and of models with states."""
    if device() == "gpu":
        yield from attention_rows()
    yield from guarded(lambda rows: rows(tiny=tiny), (batch_rows, speed_rows))


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


def own_delta_row() -> Row:
    """Returns a row that says if MLX has a kernel of its own here. If it has, compare that with ours."""
    inputs = ((mx.zeros((1, length, 2, 128)), mx.zeros((1, length, 2))) for length in nodes.LENGTHS)
    few, many = (nodes.of_graph(*mx.fast.gated_delta_update(q, q, q, gates, gates)) for q, gates in inputs)
    return Row("MLX's own gated delta net", "a loop over tokens" if many > few else "A KERNEL: is it faster than ours?")


def speed_rows(*, tiny: bool) -> Iterator[Row]:
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


def batch_rows(*, tiny: bool) -> Iterator[Row]:
    """Yields the time of a token of several answers, where buffers have room for 64 and for 256 columns more."""
    tested, length = (architectures.build("llama"), 30) if tiny else (large("llama")[0], 300)
    for columns in (64, 256):
        with patch.object(batch_buffers, "SHORT_STEP", columns):
            parts = [tested.make_layers() for _ in range(_BATCH)]
            for layers in parts:
                mx.eval(tested.logits(mx.array([words(length)]), layers))
            batch, tokens = BatchedLayers(parts), mx.array([[1]] * _BATCH)

            def step(batch: BatchedLayers = batch, tokens: mx.array = tokens) -> list[mx.array]:
                return [tested.logits(tokens, batch.layers)]

            ms = timed(step, 16)
        yield Row(f"{_BATCH} answers, {columns} columns more", f"{ms:.2f} ms a token", figures={"ms": ms})


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


def attention_rows() -> Iterator[Row]:
    """Yields the times of one query over 300 keys: MLX takes cuDNN if a cache has a multiple of 256 columns."""
    for rows, columns in product((1, _BATCH), (512, 500)):
        query = mx.random.normal((rows, 32, 1, 128)).astype(mx.bfloat16)
        keys = mx.random.normal((rows, 8, columns, 128)).astype(mx.bfloat16)
        mx.eval(query, keys)

        def attend(query: mx.array = query, keys: mx.array = keys) -> list[mx.array]:
            shown = keys[:, :, :300]
            mx.eval(shown)
            return [mx.fast.scaled_dot_product_attention(query, shown, shown, scale=0.1)]

        first, later = timed(attend, 1), timed(attend, 50)
        name = f"one query, {rows} x 300 of {columns} columns"
        yield Row(name, f"{later:.3f} ms, the first {first:.1f} ms", figures={"ms": later, "first_ms": first})


def timed(function: Callable[[], Sequence[mx.array]], times: int = 3) -> float:
    """Returns the median of the milliseconds that `function` and its arrays take."""
    found = list[float]()
    for _ in range(times):
        begin = time.perf_counter()
        mx.eval(function())
        found.append((time.perf_counter() - begin) * 1e3)
    return median(found)
