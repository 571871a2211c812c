"""Tiny models with random weights, one for every kind of layer cache.

The weights are scaled so that what a layer remembers decides the next token: `test_models` shows that another first
token changes the logits by far more than the tolerances of these tests.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layers.batch_trial import BatchTrial

from mlx_lm.models import (  # isort: skip
    deepseek_v3,
    deepseek_v32,
    deepseek_v41,
    falcon_h1,
    gemma3_text,
    gemma4_text,
    llama,
    llama4,
    mamba2,
    qwen3_next,
)
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache  # isort: skip

VOCAB = 64
WINDOW = 32  # gemma3: RotatingKVCache of this size in two of three layers; gemma4: in one of two
GROUP = 32  # quantized: head width, and entries that share a scale
CHUNK = 16  # llama4: ChunkedKVCache of this size in three of four layers


class Forward(Protocol):
    """Token ids [1, L] and a cache list to logits [1, L, VOCAB]."""

    layers: Sequence[object]

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array: ...


class Tiny(NamedTuple):
    """A model, what makes its cache list, and what its layers can do."""

    name: str
    model: Forward
    make_layers: Callable[[], list[object]]
    tolerance: float  # of logits against a prefill with other boundaries, which is the noise of the model itself


def _llama(head_dim: int = 8) -> Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    return llama.Model(args)


def _quantized() -> Module:
    model = _llama(head_dim=GROUP)
    model.make_cache = lambda: [QuantizedKVCache(GROUP, bits=8) for _ in model.layers]
    return model


def _gemma3() -> Module:
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        vocab_size=VOCAB,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
    )
    return gemma3_text.Model(args)


def _gemma4() -> Module:
    args = gemma4_text.ModelArgs(
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        head_dim=8,
        global_head_dim=16,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return gemma4_text.Model(args)


def _mamba2() -> Module:
    args = mamba2.ModelArgs(
        model_type="mamba2",
        num_heads=4,
        head_dim=8,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        state_size=8,
        num_hidden_layers=2,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=False,
        time_step_limit=(0.001, 10.0),
        time_step_rank="auto",
    )
    return mamba2.Model(args)


def _qwen3_next() -> Module:
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=0,
        num_experts_per_tok=1,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0, 1],
        moe_intermediate_size=32,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        max_position_embeddings=1024,
        full_attention_interval=2,
    )
    return qwen3_next.Model(args)


def _falcon_h1() -> Module:
    args = falcon_h1.ModelArgs(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mamba_d_ssm=32,
        mamba_d_state=8,
        mamba_d_head=8,
        mamba_n_heads=4,
        mamba_n_groups=1,
        mamba_d_conv=4,
        lm_head_multiplier=2.0,
        ssm_out_multiplier=1.0,
        vocab_size=VOCAB,
    )
    return falcon_h1.Model(args)


LATENT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 1024,
}
"""A model of multi-head latent attention."""


def _deepseek_v3() -> Module:
    return deepseek_v3.Model(deepseek_v3.ModelArgs(**LATENT))


def _deepseek_v32() -> Module:
    indexer: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 24}
    return deepseek_v32.Model(deepseek_v32.ModelArgs(**LATENT, **indexer))


def _llama4() -> Module:
    text = {
        "attention_bias": False,
        "attention_chunk_size": CHUNK,
        "head_dim": 8,
        "hidden_size": 32,
        "interleave_moe_layer_step": 8,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 1024,
        "model_type": "llama4",
        "num_attention_heads": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "vocab_size": VOCAB,
    }
    return llama4.Model(llama4.ModelArgs(text_config=text, model_type="llama4"))


def _deepseek_v41() -> Module:
    args = deepseek_v41.ModelArgs(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        compress_ratios=(0, 4),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_topk_blocks=64,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=64,
        max_position_embeddings=1024,
        hc_mult=2,
        hc_sinkhorn_iters=2,
    )
    return deepseek_v41.Model(args)


_NOISE = 2e-4  # of float32 with other boundaries; a token too many or too few is worth more than 1
_MAKERS: dict[str, tuple[Callable[[], Module], float]] = {
    "llama": (_llama, _NOISE),  # KVCache
    "gemma3": (_gemma3, _NOISE),  # KVCache and RotatingKVCache
    "mamba2": (_mamba2, _NOISE),  # ArraysCache only: no layer has a clock
    "qwen3_next": (_qwen3_next, _NOISE),  # KVCache and ArraysCache
    "falcon_h1": (_falcon_h1, _NOISE),  # CacheList(ArraysCache, KVCache)
    "deepseek_v3": (_deepseek_v3, _NOISE),  # KVCache of one head, keys and values of different widths
    "deepseek_v32": (_deepseek_v32, _NOISE),  # CacheList(KVCache, KVCache), one of them of an indexer
    "quantized": (_quantized, 5e-2),  # QuantizedKVCache: noise tips roundings to 8 bits, 0.02 without a cache
    "llama4": (_llama4, _NOISE),  # ChunkedKVCache and KVCache
    "deepseek_v41": (_deepseek_v41, 3.5e-2),  # a class of its own; noise tips roundings to 8 and 4 bits
}

KINDS = tuple(_MAKERS)
_OTHERS = {"gemma4": (_gemma4, _NOISE)}  # caches as gemma3's; layers that have none of their own


def words(count: int, seed: int = 1) -> list[int]:
    """Some tokens, the same every time; another first one for every seed."""
    return [(seed * 31 + i * i * 7 + i * 13) % VOCAB for i in range(count)]


@cache
def tiny(kind: str) -> Tiny:
    """The model of a kind out of KINDS, or gemma4, the same weights every time."""
    mx.disable_compile()
    make, tolerance = {**_MAKERS, **_OTHERS}[kind]
    mx.random.seed(7)
    model = make()
    model.update(tree_map_with_path(_weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())

    def make_layers() -> list[object]:
        return list(make_prompt_cache(model))

    return Tiny(kind, model, make_layers, tolerance)


def _weight(path: str, fresh: mx.array) -> mx.array:
    if path.endswith("A_log"):
        return mx.full(fresh.shape, -4.0, mx.float32)  # a long memory
    if "norm" in path or fresh.ndim < 2:
        return fresh
    if "embed" in path:
        return mx.random.normal(fresh.shape)
    return mx.random.normal(fresh.shape, scale=2.0 / fresh.shape[-1] ** 0.5)


def find_fault(make_layers: Callable[[], list[object]], forward: Callable[..., mx.array], vocab_size: int) -> str:
    """All of a trial of batches at once: why they cannot be, or nothing."""
    trial = BatchTrial(make_layers, forward, vocab_size)
    while trial.fault is None:
        trial.advance()
    return trial.fault
