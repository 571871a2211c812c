"""Mends mlx-lm's modules whose classes ignore config fields that transformers follows: width and scaling of the
rotation, and sliding windows. Reports ignored fields that cannot be mended (docs/internals/store.md, 3)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import ge
from typing import NamedTuple, TypeGuard, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import SuScaledRoPE, YarnRoPE, initialize_rope

from runner.model.module_config import module_text, text_config
from runner.model.opened import OpenedModel

_ROTATED_PART = {"glm": 0.5}
"""Module that rotates whole heads -> the part of a head that transformers rotates if config.json names no part."""
_UNSCALED = frozenset(
    {
        *("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox"),
        *("granitemoehybrid", "helium", "lfm2", "lfm2_moe", "minimax", "mixtral", "olmo_hybrid", "phi", "qwen3_moe"),
        *("qwen3_vl_moe", "solar_open", "stablelm", "starcoder2"),
    }
)
"""Modules that ignore `rope_scaling`, although transformers' models follow it."""
_INTERLEAVED = frozenset({"deepseek_v3", "glm4_moe_lite"})
"""Modules that rotate pairs of neighbours even if `rope_interleave` is false."""


def mend(opened: OpenedModel, module: Module) -> None:
    """Applies config fields that the fresh `module` ignores. Raises ValueError for a scaling that mlx-lm lacks."""
    name, text = opened.family.module, module_text(opened.module_config, opened.family)
    if name in _ROTATED_PART:
        part = text.get("partial_rotary_factor", _ROTATED_PART[name])
        for _, rope in _plain_ropes(module):
            rope.dims = int(rope.dims * cast("float", part))
    scaling = text.get("rope_scaling")
    if name in _UNSCALED and isinstance(scaling, dict):
        for owner, rope in [*_plain_ropes(module)]:
            owner.rope = initialize_rope(
                rope.dims, rope.base, rope.traditional, scaling, cast("int", text.get("max_position_embeddings"))
            )
    default = getattr(getattr(module, "args", None), "rope_theta", 10000.0)
    base = cast("float", text.get("rope_theta", default))
    for each in module.modules():
        if type(each) is YarnRoPE and isinstance(scaling, dict):
            _respace(each, scaling, base)
        elif type(each) is SuScaledRoPE and isinstance(scaling, dict) and not _is_long(opened, each):
            each._freqs = mx.array(scaling["short_factor"]) * base ** (mx.arange(0, each.dim, 2) / each.dim)
            each._scale = scaling.get("short_mscale", each._scale)
        elif name in _INTERLEAVED and "rope" in each:
            each.rope.traditional = text.get("rope_interleave") is not False
    windows = _windows(opened, module)
    if any(windows) and not _has_windows(module):
        _slide(module, windows)


def _plain_ropes(module: Module) -> Iterator[tuple[Module, RoPE]]:
    """Yields each rotation without scaling, together with its owner: the module whose `rope` it is."""
    for owner in module.modules():
        rope = owner.get("rope")
        if type(rope) is RoPE and rope.scale == 1:
            yield owner, rope


def _respace(rope: YarnRoPE, scaling: Mapping[str, float], base: float) -> None:
    """Applies the two fields of YaRN that mlx-lm ignores: `attention_factor` and `truncate`. If `truncate` is false, as
    in a GPT-OSS, the limits between scaled and unscaled pairs are not rounded to whole pairs."""
    rope.mscale = scaling.get("attention_factor", rope.mscale)
    if scaling.get("truncate", True):
        return
    trained, dims = scaling["original_max_position_embeddings"], rope.dims
    turns = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
    low, high = (dims * math.log(trained / (each * 2 * math.pi)) / (2 * math.log(base)) for each in turns)
    low, high = max(low, 0), min(high, dims - 1)
    scaled = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    rope._freqs = base ** (mx.arange(0, dims, 2) / dims) / (1 - scaled + scaled / scaling["factor"])


def _is_long(opened: OpenedModel, rope: SuScaledRoPE) -> bool:
    """Returns True if the context can exceed the length of the model's first training. For longer prompts transformers
    uses other factors. Keys are cached here, so all positions must share one set of factors: mlx-lm's long ones, or the
    short ones if no prompt can be that long."""
    return not 0 < opened.context_length <= rope.original_max_position_embeddings


class _Rule(NamedTuple):
    """The sliding windows of a model in transformers. mlx-lm's class has no windows, or only the windows of
    `layer_types`.

    `slides` maps a layer's index and `max_window_layers` to True if the layer has a window. If `asked`, windows count
    only if `use_sliding_window` is true. `size` and `most` are the defaults of `sliding_window` and
    `max_window_layers`.
    """

    slides: Callable[[int, int], bool]
    asked: bool = False
    size: int = 0
    most: int = 28


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"), _Rule(lambda *_: True)),
    **dict.fromkeys(("mimo", "qwen2", "qwen3"), _Rule(ge, asked=True)),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _Rule(ge, asked=True, most=80)),
    "qwen2_moe": _Rule(lambda layer, most: layer % 2 == 0 and layer < most, asked=True),
    "qwen3_moe": _Rule(lambda *_: True, asked=True),
    "dots1": _Rule(ge, size=4096, most=62),
    "gemma2": _Rule(lambda layer, _: layer % 2 == 0, size=4096),
}
"""`model_type` of a text model -> the rule for its windows."""


def _kind(opened: OpenedModel) -> str:
    """Returns the `model_type` of the text model, as in config.json."""
    return str(text_config(opened.config, opened.family).get("model_type", opened.config.get("model_type")))


def _windows(opened: OpenedModel, module: Module) -> Sequence[int]:
    """Returns the window of each layer in tokens, 0 for a layer without one; [] if no layer needs a window."""
    text, rule = text_config(opened.config, opened.family), _RULES.get(_kind(opened))
    if rule is None or (rule.asked and text.get("use_sliding_window") is not True):
        return []
    size, most = text.get("sliding_window", rule.size), text.get("max_window_layers", rule.most)
    if type(most) is not int or not _is_filled(size, opened):
        return []
    types, count = text.get("layer_types"), len(cast("list[Module]", module.layers))
    if not isinstance(types, list) or len(types) != count:
        return [size if rule.slides(layer, most) else 0 for layer in range(count)]
    return [size if kind == "sliding_attention" else 0 for kind in types]


def _is_filled(size: object, opened: OpenedModel) -> TypeGuard[int]:
    """Returns True if `size` is a number of tokens that a request can exceed."""
    return type(size) is int and 0 < size < (opened.context_length or size + 1)


def _slide(module: Module, windows: Sequence[int]) -> None:
    """Gives each layer its window, which limits the tokens in the layer's cache and mask. mlx-lm's module makes one
    mask for all layers, from the first layer's cache. If only some layers have a window, the other layers share a
    second mask."""
    layers = cast("list[Module]", module.layers)
    own = getattr(module, "make_cache", lambda: [KVCache() for _ in layers])

    def make_cache() -> list[object]:
        pairs = zip(own(), windows, strict=True)
        return [RotatingKVCache(window) if window and type(cache) is KVCache else cache for cache, window in pairs]

    module.make_cache = make_cache
    unlike = [layer for layer, window in zip(layers, windows, strict=True) if bool(window) != bool(windows[0])]
    mask: list[mx.array | str | None] = []
    for layer in unlike:
        layer.__class__ = _masked(type(layer), mask, first=layer is unlike[0], last=layer is unlike[-1])


def _masked(plain: type[Module], kept: list[mx.array | str | None], *, first: bool, last: bool) -> type[Module]:
    """Returns a subclass of `plain` that ignores the mask of its call. The first layer makes a new mask in `kept`,
    which all these layers use and the last layer drops."""

    def call(self: Module, x: mx.array, mask: mx.array | str | None, cache: object) -> mx.array:
        if first:
            kept[:] = [create_attention_mask(x, cache, return_array=isinstance(mask, mx.array))]
        own = kept[0]
        if last:
            kept.clear()  # a mask is large, and the next forward makes a new one
        return cast("mx.array", plain.__call__(self, x, own, cache))

    return type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__})


_SILU: Mapping[str, Sequence[object]] = {"hidden_act": ("silu", "swish")}
_UNREAD: Mapping[str, Mapping[str, Sequence[object]]] = {
    **dict.fromkeys(
        """
        afmoe cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 glm glm4 glm4_moe granite granitemoe helium
        hunyuan_v1_dense llama mimo ministral3 mixtral olmo2 olmo3 phi3 phimoe qwen2 qwen3 qwen3_5 qwen3_5_moe qwen3_moe
        qwen3_next seed_oss smollm3 stablelm
        """.split(),  # noqa: SIM905  a name a line would fill pages
        _SILU,
    ),
    "gemma3": {"attn_logit_softcapping": (), "final_logit_softcapping": ()},
    "gemma3_text": {"attn_logit_softcapping": (), "final_logit_softcapping": ()},
    "gpt2": {"scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,)},
    "gpt_bigcode": {"scale_attn_weights": (True,)},
    "olmoe": {"clip_qkv": (), **_SILU},
    "qwen2_moe": {"norm_topk_prob": (False,), **_SILU},
}
"""Module -> field that the module ignores and transformers follows -> the values of the field that change nothing."""


def unread(opened: OpenedModel, module: Module) -> list[str]:
    """Returns a warning for each field of config.json that makes answers differ from transformers' answers."""
    if opened.family.library is not None or opened.family.is_encoder:
        return []
    text, name = module_text(opened.module_config, opened.family), opened.family.import_name
    told = [
        f"config.json: {field} is {text[field]!r}, which {name} does not read: answers differ from transformers'"
        for field, harmless in _UNREAD.get(opened.family.module, {}).items()
        if text.get(field) is not None and text[field] not in harmless
    ]
    longs = (each for each in module.modules() if type(each) is SuScaledRoPE and _is_long(opened, each))
    if isinstance(text.get("rope_scaling"), dict) and (rope := next(longs, None)) is not None:
        first = rope.original_max_position_embeddings
        told.append(
            "config.json: the long_factor of rope_scaling is used for all positions; start with"
            f" --context {first} to use short_factor, as transformers does for prompts of up to {first} tokens"
        )
    size, is_used = text.get("sliding_window"), text.get("use_sliding_window") is not False
    if is_used and _is_filled(size, opened) and _kind(opened) not in _RULES and not _has_windows(module):
        told.append(f"answers may differ beyond {size} tokens: {name} ignores sliding_window")
    return told


def _has_windows(module: Module) -> bool:
    """Returns True if the cache of any layer has a window."""
    waiting = make_prompt_cache(module)
    while waiting:
        layer = waiting.pop()
        if isinstance(layer, RotatingKVCache | ChunkedKVCache):
            return True
        waiting += getattr(layer, "caches", ())
    return False
