"""The tensors in the models of `scripts/bench load` by name, type and shape, in all as large as wanted.

The width follows from the size; the numbers of layers and experts are fixed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LAYERS = 24
_SPARSE_LAYERS = 4
_EXPERTS = 32
_GROUP = 64
_DTYPE_BYTES = {"BF16": 2, "U32": 4}


class Tensor(NamedTuple):
    """One array of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def dense(nbytes: int) -> tuple[dict[str, object], list[Tensor]]:
    """The config of a Llama, and its tensors by the names of a source.

    A layer has 12 times the width squared in its matrices, tokens in and out have 16 times that together.
    """
    hidden = _width(nbytes, 12 * _LAYERS + 16)
    config = {**_config("llama", "LlamaForCausalLM", hidden, _LAYERS), "intermediate_size": 3 * hidden}
    tensors = _outside(hidden)
    for layer in range(_LAYERS):
        tensors += _attention(layer, hidden)
        tensors += [
            _matrix(f"model.layers.{layer}.mlp.{name}.weight", *shape)
            for name, shape in _projections(hidden, 3 * hidden).items()
        ]
    return config, tensors


def sparse(nbytes: int) -> tuple[dict[str, object], list[Tensor]]:
    """The same of a Qwen3-MoE, experts apart: each has 3 matrices of 3/8 of a width squared."""
    hidden = _width(nbytes, _SPARSE_LAYERS * (3 + _EXPERTS * 3 * 3 // 8) + 16)
    width = hidden * 3 // 8
    config = {
        **_config("qwen3_moe", "Qwen3MoeForCausalLM", hidden, _SPARSE_LAYERS),
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    tensors = _outside(hidden)
    for layer in range(_SPARSE_LAYERS):
        tensors += _attention(layer, hidden)
        tensors += [_vector(f"model.layers.{layer}.self_attn.{name}_norm.weight", 64) for name in "qk"]
        tensors.append(_matrix(f"model.layers.{layer}.mlp.gate.weight", _EXPERTS, hidden))
        tensors += [
            _matrix(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", *shape)
            for expert in range(_EXPERTS)
            for name, shape in _projections(hidden, width).items()
        ]
    return config, tensors


def _width(nbytes: int, squares: int) -> int:
    """The multiple of 128, or 64, at which so many squares of bf16 make up about so many bytes."""
    return max(64, round(math.sqrt(nbytes / 2 / squares) / 128) * 128)


def _config(model_type: str, architecture: str, hidden: int, layers: int) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 8 * hidden,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def _outside(hidden: int) -> list[Tensor]:
    return [
        _matrix("model.embed_tokens.weight", 8 * hidden, hidden),
        _matrix("lm_head.weight", 8 * hidden, hidden),
        _vector("model.norm.weight", hidden),
    ]


def _attention(layer: int, hidden: int) -> list[Tensor]:
    few = max(1, hidden // 128) * 64
    rows = {"q_proj": hidden, "k_proj": few, "v_proj": few, "o_proj": hidden}
    return [
        *(_matrix(f"model.layers.{layer}.self_attn.{name}.weight", count, hidden) for name, count in rows.items()),
        _vector(f"model.layers.{layer}.input_layernorm.weight", hidden),
        _vector(f"model.layers.{layer}.post_attention_layernorm.weight", hidden),
    ]


def _projections(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def _matrix(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, "BF16", (rows, columns))


def _vector(name: str, length: int) -> Tensor:
    return Tensor(name, "BF16", (length,))


def packed(tensor: Tensor) -> list[Tensor]:
    """Returns the arrays that Ollama's `create --quantize int4` makes of a tensor.

    Four bits, eight where it matters more; norms and embeddings stay as they are.
    """
    if len(tensor.shape) == 1 or "embed" in tensor.name:
        return [tensor]
    rows, columns = tensor.shape
    bits = 8 if any(part in tensor.name for part in ("k_proj", "v_proj", "down_proj", "lm_head")) else 4
    scales = (rows, columns // _GROUP)
    return [
        Tensor(tensor.name, "U32", (rows, columns * bits // 32)),
        Tensor(f"{tensor.name}.scale", "BF16", scales),
        Tensor(f"{tensor.name}.bias", "BF16", scales),
    ]


def stacked(tensors: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Blobs as Ollama names and fills them: one per tensor, but one for all experts of a layer."""
    experts: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        head, found, tail = tensor.name.partition(".experts.")
        if not found:
            yield tensor.name, [tensor]
            continue
        name = f"{head}.experts.{tail.partition('.')[2]}"
        experts.setdefault(f"{head}.experts", {})[name] = Tensor(name, tensor.dtype, (_EXPERTS, *tensor.shape))
    yield from ((layer, list(stacks.values())) for layer, stacks in experts.items())
