"""Models of a few million parameters for benchmarks, one for every kind of layer cache, made from a seed.

The weights are random, and scaled so that what a layer remembers decides the next token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path, tree_reduce

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

# isort: split
from mlx_lm.models import deepseek_v3, gemma3_text, llama, llama4, mamba2, qwen3_next
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

HEAD = 64
WINDOW = 512
CHUNK = 1024
KV_BITS = 8


class Size(NamedTuple):
    """The size of a model: the width, a multiple of 2 x HEAD; the number of layers, rounded up to whole periods where
    kinds of layers alternate; and the number of tokens."""

    hidden: int
    layers: int
    vocabulary: int


class Forward(Protocol):
    """Token ids [1, L] and a cache list to logits [1, L, V]."""

    layers: Sequence[object]

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array: ...


class Subject(NamedTuple):
    """A model to measure: `make_layers` makes its fresh cache list."""

    kind: str
    model: Forward
    parameters: int
    make_layers: Callable[[], list[object]]


def _llama(size: Size) -> Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=3 * size.hidden,
        num_attention_heads=size.hidden // HEAD,
        num_key_value_heads=size.hidden // HEAD // 2,
        rms_norm_eps=1e-5,
        vocab_size=size.vocabulary,
        tie_word_embeddings=True,
    )
    return llama.Model(args)


def _gemma3(size: Size) -> Module:
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=3 * size.hidden,
        num_attention_heads=size.hidden // HEAD,
        num_key_value_heads=size.hidden // HEAD // 2,
        head_dim=HEAD,
        query_pre_attn_scalar=HEAD,
        vocab_size=size.vocabulary,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
    )
    return gemma3_text.Model(args)


def _mamba2(size: Size) -> Module:
    args = mamba2.ModelArgs(
        model_type="mamba2",
        num_heads=2 * size.hidden // HEAD,
        head_dim=HEAD,
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        state_size=HEAD,
        num_hidden_layers=size.layers,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.001, 10.0),
        time_step_rank="auto",
    )
    return mamba2.Model(args)


def _qwen3_next(size: Size) -> Module:
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next",
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=3 * size.hidden,
        num_attention_heads=size.hidden // HEAD,
        num_key_value_heads=size.hidden // HEAD // 2,
        head_dim=HEAD,
        linear_num_value_heads=size.hidden // HEAD,
        linear_num_key_heads=size.hidden // HEAD // 2,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        linear_conv_kernel_dim=4,
        num_experts=0,
        num_experts_per_tok=1,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=size.hidden,
        mlp_only_layers=list(range(size.layers)),
        moe_intermediate_size=size.hidden,
        rms_norm_eps=1e-5,
        vocab_size=size.vocabulary,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        max_position_embeddings=1 << 20,
        full_attention_interval=2,
        tie_word_embeddings=True,
    )
    return qwen3_next.Model(args)


def _deepseek_v3(size: Size) -> Module:
    args = deepseek_v3.ModelArgs(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        moe_intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // HEAD,
        num_key_value_heads=size.hidden // HEAD,
        n_routed_experts=None,
        kv_lora_rank=HEAD,
        q_lora_rank=2 * HEAD,
        qk_rope_head_dim=HEAD // 2,
        qk_nope_head_dim=HEAD,
        v_head_dim=HEAD,
        max_position_embeddings=1 << 20,
    )
    return deepseek_v3.Model(args)


def _llama4(size: Size) -> Module:
    text = {
        "attention_bias": False,
        "attention_chunk_size": CHUNK,
        "head_dim": HEAD,
        "hidden_size": size.hidden,
        "interleave_moe_layer_step": 2 * size.layers,  # no experts
        "intermediate_size": size.hidden,
        "intermediate_size_mlp": 3 * size.hidden,
        "max_position_embeddings": 1 << 20,
        "model_type": "llama4",
        "num_attention_heads": size.hidden // HEAD,
        "num_experts_per_tok": 1,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.hidden // HEAD // 2,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "vocab_size": size.vocabulary,
    }
    return llama4.Model(llama4.ModelArgs(text_config=text, model_type="llama4"))


_MAKERS: dict[str, tuple[Callable[[Size], Module], str]] = {
    "plain": (_llama, "keys and values of every token"),
    "window": (_gemma3, f"every other layer keeps a sliding window of {WINDOW} tokens"),
    "recurrent": (_mamba2, "a recurrent state in every layer, nothing else"),
    "hybrid": (_qwen3_next, "every other layer is recurrent"),
    "mla": (_deepseek_v3, "latent attention: one narrow head"),
    "chunk": (_llama4, f"three of four layers attend within chunks of {CHUNK} tokens"),
    "quantized": (_llama, f"keys and values in {KV_BITS} bits"),
}

_PERIODS = {"window": 2, "hybrid": 2, "chunk": 4}  # layers until the kinds repeat

KINDS = {kind: meaning for kind, (_, meaning) in _MAKERS.items()}


def make_subject(kind: str, size: Size, seed: int = 0) -> Subject:
    """The model of a kind out of KINDS, the same weights for the same seed."""
    if size.hidden % (2 * HEAD) or size.layers < 1:
        raise ValueError(f"the width of a model is a multiple of {2 * HEAD}, and it has layers")
    period = _PERIODS.get(kind, 1)
    size = size._replace(layers=-(-size.layers // period) * period)
    mx.random.seed(seed)
    model = _MAKERS[kind][0](size)
    model.update(tree_map_with_path(_weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    parameters: int = tree_reduce(lambda total, weight: total + weight.size, model.parameters(), 0)

    def make_layers() -> list[object]:
        if kind == "quantized":
            return [QuantizedKVCache(group_size=HEAD, bits=KV_BITS) for _ in model.layers]
        return list(make_prompt_cache(model))

    return Subject(kind, model, parameters, make_layers)


def _weight(path: str, fresh: mx.array) -> mx.array:
    if path.endswith("A_log"):
        return mx.full(fresh.shape, -4.0, mx.float32)  # a long memory
    if "norm" in path or fresh.ndim < 2:
        return fresh
    if "embed" in path:
        return mx.random.normal(fresh.shape, scale=fresh.shape[-1] ** -0.5)
    return mx.random.normal(fresh.shape, scale=2.0 / fresh.shape[-1] ** 0.5)
