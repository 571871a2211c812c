"""From the tensors of mlx-lm's modules to those that Hugging Face publishes.

A step takes and returns tensors by name, and undoes one thing of a `sanitize`. What it makes is right if mlx-lm opens
it; `tests/tools/models/test_sources.py` tries.
"""

import re
from collections.abc import Callable, Mapping

import mlx.core as mx

Weights = dict[str, mx.array]
Step = Callable[[Weights], Weights]


def renamed(*rules: tuple[str, str]) -> Step:
    """Applies the first rule (regular expression, replacement) that matches the beginning of a name."""

    def step(weights: Weights) -> Weights:
        return {_rename(name, rules): array for name, array in weights.items()}

    return step


def _rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    return name


def joined_layer_inputs(weights: Weights) -> Weights:
    """Joins the projections by which the layers of an EmbeddingGemma 2 read the embeddings into one matrix."""
    part = re.compile(r"layers\.(\d+)\.ple_block\.per_layer_model_projection\.weight")
    found = {int(match[1]): array for name, array in weights.items() if (match := part.fullmatch(name))}
    rest = {name: array for name, array in weights.items() if not part.fullmatch(name)}
    return rest | {"ple.per_layer_model_projection.weight": mx.concatenate([found[key] for key in sorted(found)])}


def without(pattern: str) -> Step:
    def step(weights: Weights) -> Weights:
        return {name: array for name, array in weights.items() if not re.match(pattern, name)}

    return step


def per_expert(stacked: str, separate: str, projections: Mapping[str, str] | None = None) -> Step:
    """`<stacked>.p.weight` [E, out, in] becomes `<separate>.0.q.weight` [out, in], ..; `projections` maps p to q."""

    def step(weights: Weights) -> Weights:
        result: Weights = {}
        for name, array in weights.items():
            head, found, tail = name.partition(f".{stacked}.")
            if not found:
                result[name] = array
                continue
            old, suffix = tail.split(".", 1)
            new = (projections or {}).get(old, old)
            for index in range(array.shape[0]):
                result[f"{head}.{separate}.{index}.{new}.{suffix}"] = array[index]
        return result

    return step


def stacked_experts(separate: str, stacked: str) -> Step:
    def step(weights: Weights) -> Weights:
        result: Weights = {}
        groups: dict[str, dict[int, mx.array]] = {}
        for name, array in weights.items():
            match = re.fullmatch(rf"(.*)\.{re.escape(separate)}\.(\d+)\.(.*)", name)
            if match:
                groups.setdefault(f"{match[1]}.{stacked}.{match[3]}", {})[int(match[2])] = array
            else:
                result[name] = array
        return result | {name: mx.stack([group[i] for i in range(len(group))]) for name, group in groups.items()}

    return step


def fused_experts(stacked: str, gate_up: str, down: str) -> Step:
    """`<stacked>.{gate,up}_proj.weight` [E, n, in] become `<gate_up>` [E, 2n, in]; down_proj follows."""

    def step(weights: Weights) -> Weights:
        result = dict(weights)
        for name in weights:
            if name.endswith(f".{stacked}.gate_proj.weight"):
                head = name.removesuffix(f"{stacked}.gate_proj.weight")
                parts = [result.pop(f"{head}{stacked}.{part}_proj.weight") for part in ("gate", "up", "down")]
                result[f"{head}{gate_up}"] = mx.concatenate(parts[:2], axis=-2)
                result[f"{head}{down}"] = parts[2]
        return result

    return step


def raw_convolutions(weights: Weights) -> Weights:
    """[C, K, 1] as MLX wants them become PyTorch's [C, 1, K]."""
    return {
        name: array.moveaxis(2, 1) if name.endswith(("conv1d.weight", "conv.conv.weight")) else array
        for name, array in weights.items()
    }


SHIFTED_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight", "language_model.norm.weight"),
)
"""The norms of Qwen3.5 and Qwen3-Next whose published weights are less by one; `linear_attn.norm` is not among them."""


def centred_norms(weights: Weights) -> Weights:
    """Norms are published as what they add to one."""
    return {name: array - 1 if name.endswith(SHIFTED_NORMS) else array for name, array in weights.items()}


def latent_projections(weights: Weights) -> Weights:
    """`embed_q` [H, rank, nope] and `unembed_out` [H, v, rank] become `kv_b_proj` [H (nope + v), rank]."""
    result = dict(weights)
    for name in weights:
        if name.endswith(".embed_q.weight"):
            head = name.removesuffix(".embed_q.weight")
            parts = [result.pop(name).swapaxes(-1, -2), result.pop(f"{head}.unembed_out.weight")]
            result[f"{head}.kv_b_proj.weight"] = mx.concatenate(parts, axis=1).flatten(0, 1)
    return result


def transposed(*endings: str) -> Step:
    """Swaps the last two axes of the tensors whose names end so."""

    def step(weights: Weights) -> Weights:
        return {name: array.swapaxes(-1, -2) if name.endswith(endings) else array for name, array in weights.items()}

    return step


def mxfp4_blocks(weights: Weights) -> Weights:
    """GPT-OSS publishes its experts in mxfp4, gate and up rows in turn, as bytes: `_blocks` [E, n, in/32, 16]."""
    result = dict(weights)
    for name in weights:
        if not name.endswith(".mlp.experts.gate_proj.weight"):
            continue
        head = name.removesuffix("gate_proj.weight")
        pairs = {}
        for kind in ("weight", "bias"):
            gate, up = result.pop(f"{head}gate_proj.{kind}"), result.pop(f"{head}up_proj.{kind}")
            pairs[kind] = mx.stack([gate, up], axis=2).flatten(1, 2)
        down = {kind: result.pop(f"{head}down_proj.{kind}") for kind in ("weight", "bias")}
        for projection, parts in (("gate_up_proj", pairs), ("down_proj", down)):
            words, scales, *_ = mx.quantize(parts["weight"], 32, 4, mode="mxfp4")
            result[f"{head}{projection}_blocks"] = words.view(mx.uint8).reshape(*scales.shape, 16)
            result[f"{head}{projection}_scales"] = scales
            result[f"{head}{projection}_bias"] = parts["bias"]
    return result
