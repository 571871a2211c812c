"""Fields of a configuration that mlx-lm's modules ignore: windows and rotations, against plain references."""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module

import runner.process.lean_mlx_lm  # noqa: F401
from runner.errors import ModelError
from runner.model import OpenedModel, open_model
from runner.model.module_config import module_text
from runner.model.weights.assembly import build_module
from runner.model.weights.loading import load
from runner.model.weights.mended import _UNSCALED, _plain_ropes, unread
from scripts.tools.models.architectures import Values, tiny_of
from scripts.tools.models.store import write_store
from scripts.tools.models.tiny import Tiny, words
from tests.lib.driver import largest
from tests.model.architectures import caching
from tests.model.architectures.splitting import check_equal as check_ranks
from tests.model.architectures.subject import Subject, oracle, run
from tests.model.loading.conftest import checked
from tests.model.ranks.pair import alone, pair
from tests.published.measure import frequencies

SIZE = 24
"""Tokens of a window: fewer than those of a prompt, of its cached part, and of a forward."""
EVERY, USED = {"sliding_window": SIZE}, {"sliding_window": SIZE, "use_sliding_window": True}


READS = "config.json:"
DIFFER = "answers differ from transformers'"


class Windows(NamedTuple):
    """The fields of a configuration, and the layers that have a window by transformers' rules; None: all."""

    module: str
    fields: Mapping[str, object]
    slide: Sequence[int] | None = None
    model_type: str = ""


WINDOWS = {
    "mistral": Windows("llama", {**EVERY, "layer_types": None}, model_type="mistral"),
    "ministral3": Windows("ministral3", {**EVERY, "layer_types": None}),
    "mixtral": Windows("mixtral", EVERY),
    "phi3": Windows("phi3", EVERY),
    "phimoe": Windows("phimoe", EVERY),
    "starcoder2": Windows("starcoder2", EVERY),
    "qwen3_moe": Windows("qwen3_moe", USED),
    "qwen2": Windows("qwen2", {**USED, "max_window_layers": 1}, (1, 2, 3)),
    "qwen2 by types": Windows(
        "qwen2",
        {**USED, "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
        (0, 3),
    ),
    "qwen3": Windows("qwen3", {**USED, "max_window_layers": 2}, (2, 3)),
    "qwen2_moe": Windows("qwen2_moe", {**USED, "max_window_layers": 2}, (0,)),
    "mimo": Windows("mimo", {**USED, "max_window_layers": 3}, (3,)),
    "dots1": Windows("dots1", {**EVERY, "max_window_layers": 2}, (2, 3)),
    "gemma2": Windows("gemma2", EVERY, (0, 2)),
    "qwen2_vl": Windows("qwen2_vl", {**USED, "max_window_layers": 1, "layer_types": None}, (1, 2, 3)),
}
UNUSED: Mapping[str, Windows] = {
    "null": Windows("llama", {"sliding_window": None, "layer_types": None}, model_type="mistral"),
    "not used": Windows("qwen2", {"sliding_window": SIZE, "use_sliding_window": False, "max_window_layers": 0}),
    "not said to be used": Windows("qwen3", {"sliding_window": SIZE, "max_window_layers": 0}),
    "beyond the last layer": Windows("qwen2", {**USED, "max_window_layers": 28}),
    "no field of the model's": Windows("llama", {**EVERY, "layer_types": None}),
}


class Slider(Subject):
    """An architecture with windows, loaded by this runner."""

    def __init__(self, case: Windows, root: Path) -> None:
        super().__init__(case.module, root)
        self.case = case

    @cached_property
    def config(self) -> Values:
        value = dict(super().config)
        part = value.get("text_config", value)
        assert isinstance(part, dict)
        part |= self.case.fields
        return {**value, "model_type": self.case.model_type or self.name}

    @cached_property
    def loaded(self) -> Module:
        return load(self.opened).module

    @cached_property
    def tiny(self) -> Tiny:
        return tiny_of(self.name, self.loaded)

    @property
    def slide(self) -> Sequence[int]:
        return range(len(self.loaded.layers)) if self.case.slide is None else self.case.slide


def masked(plain: type[Module], mask: mx.array) -> type[Module]:
    names = signature(plain.__call__)

    def call(*args: object, **named: object) -> mx.array:
        given = names.bind(*args, **named).arguments
        found: mx.array = plain.__call__(**{**given, "mask": mask})
        return found

    return type(plain.__name__, (plain,), {"__call__": call})


def seen(tokens: Sequence[int], it: Slider) -> mx.array:
    """Returns the scores [N, V] of mlx-lm's own module without a cache, each layer with an explicit mask."""
    module = oracle(it.directory)
    at = mx.arange(len(tokens))
    back = at[:, None] - at[None]
    for index, layer in enumerate(module.layers):
        window = SIZE if index in it.slide else len(tokens)
        layer.__class__ = masked(type(layer), (back >= 0) & (back < window))
    scores: mx.array = module(mx.array([tokens]))[0]
    return scores


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_that_mlx_lm_does_not_read_is_kept(name: str, tmp_path: Path) -> None:
    """Computed at once, in pieces or token by token; from the cache, in rounds, in a batch or from the disk."""
    it = Slider(WINDOWS[name], tmp_path)
    tokens = words(41, seed=1)
    wanted = seen(tokens, it)
    unread = oracle(it.directory)(mx.array([tokens]))[0]
    assert largest(unread[:SIZE] - wanted[:SIZE]) <= it.tiny.tolerance
    assert largest(unread[-1] - wanted[-1]) > 10 * it.tiny.tolerance
    for pieces in ([41], [5, 30, 6], [3] * 12 + [1] * 5):
        layers, at, found = it.tiny.make_layers(), 0, []
        for count in pieces:
            found.append(it.tiny.logits(mx.array([tokens[at : at + count]]), layers)[0])
            mx.eval(found)
            at += count
        assert largest(mx.concatenate(found) - wanted[:, : found[0].shape[-1]]) <= it.tiny.tolerance
    for question in caching.QUESTIONS:
        question(it)


def test_the_cache_of_a_layer_with_a_window_keeps_no_more(tmp_path: Path) -> None:
    """And the report says so."""
    it = Slider(WINDOWS["qwen2"], tmp_path)
    assert [getattr(layer, "max_size", 0) for layer in it.tiny.make_layers()] == [0, SIZE, SIZE, SIZE]
    found = checked(it.directory, tmp_path)
    assert {(kind.name, kind.count) for kind in found.caches or ()} == {
        ("full attention", 1),
        (f"sliding window {SIZE}", 3),
    }


def test_no_mask_outlives_its_forward(tmp_path: Path) -> None:
    """A mask may be large. The next forward does not use one that a broken forward left."""
    it = Slider(WINDOWS["qwen2"], tmp_path)
    tokens, layers = mx.array([words(41, seed=1)]), it.loaded.layers
    wanted = it.tiny.logits(tokens, it.tiny.make_layers())
    broken = type(layers[2])
    with patch.object(broken, "__call__", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        it.tiny.logits(tokens[:, :30], it.tiny.make_layers())
    assert mx.array_equal(it.tiny.logits(tokens, it.tiny.make_layers()), wanted)
    mx.eval(wanted)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.eval(it.tiny.logits(tokens, it.tiny.make_layers()))
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("name", UNUSED)
def test_a_window_that_the_model_does_not_use_costs_nothing(name: str, tmp_path: Path) -> None:
    it = Slider(UNUSED[name], tmp_path)
    assert {type(layer).__name__ for layer in it.tiny.make_layers()} == {"KVCache"}


def test_a_window_that_fills_only_beyond_the_context_is_none(tmp_path: Path) -> None:
    """Of a model whose context is cut."""
    it = Slider(WINDOWS["phi3"], tmp_path)
    for context, kind in ((SIZE, "KVCache"), (SIZE + 1, "RotatingKVCache"), (0, "RotatingKVCache")):
        layers = load(it.opened._replace(context_length=context)).make_layers()
        assert {type(layer).__name__ for layer in layers} == {kind}


@pytest.mark.full
@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_windows_are_kept_over_two_ranks(name: str, tmp_path: Path) -> None:
    it = Slider(WINDOWS[name], tmp_path)
    with pair(tmp_path) as two:
        check_ranks(two.load(it.directory), alone(it.directory))


THETA, FACTOR, TRAINED = 10000.0, 4.0, 16
"""As in the configurations of all tiny models; tokens that a scaled one was trained on."""


def spins(dims: int) -> np.ndarray:
    """Returns the angle by which each pair of numbers rotates from token to token."""
    found: np.ndarray = THETA ** -(np.arange(0, dims, 2) / dims)
    return found


SCALINGS: Mapping[str, Mapping[str, object]] = {
    "linear": {},
    "yarn": {"original_max_position_embeddings": TRAINED},
    "llama3": {"original_max_position_embeddings": TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def turned(x: np.ndarray, angles: np.ndarray, *, neighbours: bool, gain: float = 1.0) -> np.ndarray:
    """Rotates the first numbers of x [..., tokens, width] by angles [tokens, pairs]. A pair is two neighbours, or a
    number of one half and its counterpart in the other."""
    width = 2 * angles.shape[-1]
    pairs = [slice(0, width, 2), slice(1, width, 2)] if neighbours else [slice(0, width // 2), slice(width // 2, width)]
    out = x.copy()
    first, second = (x[..., each] for each in pairs)
    out[..., pairs[0]] = gain * (first * np.cos(angles) - second * np.sin(angles))
    out[..., pairs[1]] = gain * (first * np.sin(angles) + second * np.cos(angles))
    return out


def check_ropes(opened: OpenedModel, config: Mapping[str, object], wanted: "Turn", count: int = 0) -> Module:
    """All rotations of a module of this configuration turn by `wanted`. Returns the module."""
    module = build_module(opened._replace(module_config={**opened.module_config, **config}))[0]
    ropes = [each["rope"] for each in module.modules() if "rope" in each]
    x = mx.random.normal((1, 2, 3, 2 * wanted.spins.size), key=mx.random.key(1))
    angles = np.arange(wanted.at, wanted.at + 3)[:, None] * wanted.spins
    right = mx.array(turned(np.array(x), angles, neighbours=wanted.neighbours, gain=wanted.gain))
    assert len(ropes) == (count or len(module.layers))
    for rope in ropes:
        assert mx.allclose(rope(mx.array(x), offset=wanted.at), right, atol=wanted.tolerance)
    return module


class Turn(NamedTuple):
    """The angles of a token's pairs, and the position from which three tokens are rotated."""

    spins: np.ndarray
    neighbours: bool = False
    gain: float = 1.0
    at: int = 4
    tolerance: float = 1e-4


@pytest.mark.parametrize("name", sorted(_UNSCALED))
def test_a_scaling_that_mlx_lm_does_not_read_is_applied(name: str, tmp_path: Path) -> None:
    it = Subject(name, tmp_path)
    x = mx.random.normal((1, 2, 5, 64), key=mx.random.key(1))
    plain = [rope for _, rope in _plain_ropes(build_module(it.opened)[0])]
    assert plain
    for kind, scaling in SCALINGS.items():
        fields = {"rope_scaling": {"type": kind, "rope_type": kind, "factor": FACTOR, **scaling}}
        value = copy.deepcopy(it.opened.module_config)
        module_text(value, it.opened.family).update(fields)
        opened = it.opened._replace(module_config=value)
        module = build_module(opened)[0]
        ropes = [each["rope"] for each in module.modules() if "rope" in each]
        assert len(ropes) == len(plain)
        for rope, before in zip(ropes, plain, strict=True):
            spun, gain = frequencies({"kind": kind, "theta": THETA, "factor": FACTOR, **scaling}, before.dims)
            angles = np.arange(3, 8)[:, None] * spun
            wanted = turned(np.array(x), angles, neighbours=before.traditional, gain=gain)
            found = rope(mx.array(x), offset=3)[..., : before.dims]
            assert mx.allclose(found, mx.array(wanted)[..., : before.dims], atol=1e-4), kind


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "llama"])
@pytest.mark.parametrize("given", [{}, {"truncate": False}, {"truncate": True}, {"attention_factor": 0.75}])
def test_yarn_follows_the_fields_that_mlx_lm_does_not_read(
    name: str, given: Mapping[str, object], tmp_path: Path
) -> None:
    """A GPT-OSS has `truncate` false."""
    trained, dims = 4096, 64
    scaling = {"type": "yarn", "factor": FACTOR, "original_max_position_embeddings": trained, **given}
    it = Subject(name, tmp_path)
    part = {"head_dim": dims, "rope_scaling": scaling, "max_position_embeddings": 16384, "rope_theta": THETA}
    angles, gain = frequencies({"kind": "yarn", "theta": THETA, **scaling}, dims)
    gain = cast("float", given.get("attention_factor", gain))
    check_ropes(it.opened, part, Turn(angles, gain=gain, at=900, tolerance=1e-3), 4)


@pytest.mark.parametrize(("context", "long"), [(TRAINED, False), (TRAINED - 1, False), (TRAINED + 1, True), (0, True)])
@pytest.mark.parametrize("name", ["phi3", "phimoe", "llama"])
def test_the_length_of_the_context_decides_between_long_and_short_factors(
    name: str, context: int, long: bool, tmp_path: Path
) -> None:
    it = Subject(name, tmp_path)
    dims = it.opened.module_config["hidden_size"] // it.opened.module_config["num_attention_heads"]  # type: ignore[operator]
    factors = {"short_factor": [1.0 + pair / dims for pair in range(dims // 2)], "long_factor": [3.0] * (dims // 2)}
    trained = {"original_max_position_embeddings": TRAINED}
    gains = {"short_mscale": 1.25, "long_mscale": 1.5} if name == "phimoe" else {}
    scaling = {"type": "longrope", "rope_type": "longrope", **factors, **gains, **trained}
    part = {"rope_scaling": scaling, **trained, "max_position_embeddings": TRAINED**2, "partial_rotary_factor": 1.0}
    opened = it.opened._replace(module_config={**it.opened.module_config, **part}, context_length=context)
    angles = spins(dims) / np.array(factors["long_factor" if long else "short_factor"])
    gain = gains["long_mscale" if long else "short_mscale"] if gains else np.sqrt(2)
    module = check_ropes(opened, {}, Turn(angles, gain=gain))
    told = [each for each in unread(opened, module) if "--context 16 to use short_factor" in each]
    assert len(told) == long


@pytest.mark.parametrize(
    ("given", "neighbours"), [({}, True), ({"rope_interleave": True}, True), ({"rope_interleave": False}, False)]
)
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
def test_rope_interleave_decides_which_pairs_rotate(
    name: str, given: Mapping[str, object], neighbours: bool, tmp_path: Path
) -> None:
    it = Subject(name, tmp_path)
    check_ropes(it.opened, given, Turn(spins(8), neighbours=neighbours), 4)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"partial_rotary_factor": 0.5}, 0.5),
        ({"partial_rotary_factor": None}, 0.5),
        ({"partial_rotary_factor": 1.0}, 1),
    ],
)
def test_glm_rotates_the_part_of_each_head_that_its_configuration_names(
    fields: Mapping[str, object], part: float, tmp_path: Path
) -> None:
    """Compared with attention in numpy. A GLM that names no part rotates a half, as in transformers."""
    it = Slider(Windows("glm", fields), tmp_path)
    attention = it.loaded.layers[0].self_attn
    heads, groups, width = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    x = mx.random.normal((1, 7, 32), key=mx.random.key(2))
    q, k, v = (
        np.array(each(x)).reshape(7, -1, width).swapaxes(0, 1)
        for each in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    angles = np.arange(7)[:, None] * spins(int(part * width))
    q, k = (turned(each, angles, neighbours=True) for each in (q, k))
    k, v = (np.repeat(each, heads // groups, axis=0) for each in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(width) + np.triu(np.full((7, 7), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ v
    wanted = attention.o_proj(mx.array(mixed.swapaxes(0, 1).reshape(1, 7, -1)))
    assert mx.allclose(attention(x, mask="causal"), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("module", "fields", "told"),
    [
        ("olmoe", {"clip_qkv": 8.0}, f"{READS} clip_qkv is 8.0, which mlx_lm.models.olmoe does not read: {DIFFER}"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            f"{READS} scale_attn_by_inverse_layer_idx is True, which mlx_lm.models.gpt2 does not read: {DIFFER}",
        ),
        (
            "smollm3",
            {**USED, "layer_types": None},
            f"answers may differ beyond {SIZE} tokens: mlx_lm.models.smollm3 ignores sliding_window",
        ),
        ("smollm3", {**USED, "use_sliding_window": False, "layer_types": None}, ""),
        ("smollm3", {**USED, "max_position_embeddings": SIZE, "layer_types": None}, ""),
        (
            "qwen2",
            {"hidden_act": "relu"},
            f"{READS} hidden_act is 'relu', which mlx_lm.models.qwen2 does not read: {DIFFER}",
        ),
        ("qwen2", {"hidden_act": "silu"}, ""),
        ("gemma3_text", EVERY, ""),
        ("phi3", EVERY, ""),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}, ""),
        ("olmoe", {"clip_qkv": None}, ""),
    ],
)
def test_a_field_that_no_module_reads_is_reported(
    module: str, fields: Mapping[str, object], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`check` and the log name it."""
    it = Slider(Windows(module, fields), tmp_path)
    with caplog.at_level("WARNING", "runner"):
        load(it.opened)
    found = [each for each in checked(it.directory, tmp_path).warnings if "differ" in each]
    assert found == ([told] if told else [])
    assert [each.getMessage() for each in caplog.records if "differ" in each.getMessage()] == found


@pytest.mark.parametrize(("said", "loads"), [(None, True), (True, True), (False, False)])
def test_a_head_that_a_module_never_has_is_dropped_unless_the_model_is_untied(
    said: bool | None, loads: bool, tmp_path: Path
) -> None:
    """In mlx-lm a Gemma is always tied; a configuration of transformers need not say so."""
    it = Slider(Windows("gemma2", {} if said is None else {"tie_word_embeddings": said}), tmp_path)
    directory = it.write("headed", {**it.weights, "lm_head.weight": it.weights["model.embed_tokens.weight"]})
    opened = open_model(str(directory), tmp_path)
    if loads:
        assert mx.array_equal(run(load(opened).module), run(it.loaded))
        return
    with pytest.raises(ModelError, match=r"holds 1 tensors that mlx_lm\.models\.gemma2 does not know: lm_head\.weight"):
        load(opened)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_head_alone_is_the_embedding_of_a_tied_model(name: str, tmp_path: Path) -> None:
    """The safetensors library keeps the name that comes first in the alphabet."""
    it = Slider(Windows(name, {"tie_word_embeddings": True}), tmp_path)
    weights = dict(it.weights)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    directory = it.write("headed", weights)
    write_store(tmp_path, "m", directory)
    for model in ("m", str(directory)):
        assert mx.array_equal(run(load(open_model(model, tmp_path)).module), run(it.loaded))
