"""Heads computed from published tensors by the formulas alone: no module, no cache, no packing."""

from collections.abc import Mapping

import mlx.core as mx

from scripts.tools.models.sources_form import Config

Weights = Mapping[str, mx.array]


def states(config: Config, weights: Weights, embedded: mx.array, hidden: mx.array) -> mx.array:
    """The hidden states [L, D] of the head in `weights`, named as published, for the rows of the next tokens and the
    hidden states before them, [L, D] each."""
    mtp = {name.partition("mtp.")[2]: array.astype(mx.float32) for name, array in weights.items() if "mtp." in name}
    text = config.get("text_config", config)
    assert isinstance(text, dict)
    return _nemotron(text, mtp, embedded, hidden) if "mamba_num_heads" in text else _qwen(text, mtp, embedded, hidden)


def _qwen(text: Config, mtp: Weights, embedded: mx.array, hidden: mx.array) -> mx.array:
    def norm(x: mx.array, name: str) -> mx.array:
        return _norm(x, 1 + mtp[f"{name}.weight"], 1e-6)

    joined = mx.concatenate([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], axis=-1)
    x = joined @ mtp["fc.weight"].T
    layer = "layers.0."
    inputs = norm(x, f"{layer}input_layernorm")
    heads = _projected(inputs, mtp, f"{layer}self_attn.q_proj", 4)  # [H, L, 2 W]
    queries, gates = heads[..., :16], heads[..., 16:]
    keys, values = (_projected(inputs, mtp, f"{layer}self_attn.{part}_proj", 2) for part in "kv")
    queries, keys = (
        _rotated(norm(part, f"{layer}self_attn.{name}_norm"), 4, 1_000_000.0)
        for part, name in ((queries, "q"), (keys, "k"))
    )
    seen = _attended(queries, keys, values) * mx.sigmoid(gates)
    x = x + seen.swapaxes(0, 1).flatten(1) @ mtp[f"{layer}self_attn.o_proj.weight"].T
    inputs = norm(x, f"{layer}post_attention_layernorm")
    mlp = f"{layer}mlp"
    if f"{mlp}.gate.weight" in mtp:
        x = x + _experts(inputs, mtp, mlp)
        shared = _gated(inputs, *(mtp[f"{mlp}.shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")))
        x = x + mx.sigmoid(inputs @ mtp[f"{mlp}.shared_expert_gate.weight"].T) * shared
    else:
        x = x + _gated(inputs, *(mtp[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down")))
    return norm(x, "norm")


def _experts(x: mx.array, mtp: Weights, mlp: str) -> mx.array:
    scores = mx.softmax(x @ mtp[f"{mlp}.gate.weight"].T, axis=-1)
    rows = []
    for row, score in zip(x, scores, strict=True):
        chosen = sorted(range(4), key=lambda expert, score=score: -score[expert].item())[:2]  # type: ignore[misc]
        total = sum(score[expert] for expert in chosen)
        rows.append(sum(score[expert] / total * _gated(row, *_expert(mtp, mlp, expert)) for expert in chosen))
    return mx.stack(rows)  # type: ignore[arg-type]


def _expert(mtp: Weights, mlp: str, expert: int) -> list[mx.array]:
    fused = mtp.get(f"{mlp}.experts.gate_up_proj")
    if fused is None:
        return [mtp[f"{mlp}.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
    return [fused[expert, :64], fused[expert, 64:], mtp[f"{mlp}.experts.down_proj"][expert]]


def _nemotron(text: Config, mtp: Weights, embedded: mx.array, hidden: mx.array) -> mx.array:
    def norm(x: mx.array, name: str) -> mx.array:
        return _norm(x, mtp[f"{name}.weight"], 1e-5)

    if "fc.weight" in mtp:
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    else:
        last = max(name.split(".")[1] for name in mtp if name.startswith("layers."))
        names = "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", f"layers.{last}.final_layernorm"
    joined = mx.concatenate([norm(embedded, names[0]), norm(hidden, names[1])], axis=-1)
    x = joined @ mtp[f"{names[2]}.weight"].T
    for layer in sorted({name.split(".")[1] for name in mtp if name.startswith("layers.")}):
        mixer = f"layers.{layer}.mixer"
        inputs = norm(x, f"layers.{layer}.norm")
        if f"{mixer}.q_proj.weight" in mtp:
            parts = (
                _projected(inputs, mtp, f"{mixer}.{part}_proj", heads) for part, heads in (("q", 4), ("k", 2), ("v", 2))
            )
            seen = _attended(*parts)
            x = x + seen.swapaxes(0, 1).flatten(1) @ mtp[f"{mixer}.o_proj.weight"].T
        elif f"{mixer}.gate.weight" in mtp:
            x = x + _squared(inputs, mtp, f"{mixer}.shared_experts") + _nemotron_experts(inputs, mtp, mixer)
        else:
            x = x + _squared(inputs, mtp, mixer)
    return norm(x, names[3])


def _nemotron_experts(x: mx.array, mtp: Weights, mixer: str) -> mx.array:
    scores = mx.sigmoid(x @ mtp[f"{mixer}.gate.weight"].T)
    ranks = scores + mtp[f"{mixer}.gate.e_score_correction_bias"]
    rows = []
    for row, score, rank in zip(x, scores, ranks, strict=True):
        chosen = sorted(range(16), key=lambda expert, rank=rank: -rank[expert].item())[:2]  # type: ignore[misc]
        total = sum(score[expert] for expert in chosen)
        rows.append(
            sum(2.5 * score[expert] / total * _squared(row, mtp, f"{mixer}.experts.{expert}") for expert in chosen)
        )
    return mx.stack(rows)  # type: ignore[arg-type]


def _squared(x: mx.array, mtp: Weights, path: str) -> mx.array:
    return mx.square(mx.maximum(x @ mtp[f"{path}.up_proj.weight"].T, 0)) @ mtp[f"{path}.down_proj.weight"].T


def _gated(x: mx.array, gate: mx.array, up: mx.array, down: mx.array) -> mx.array:
    raised = x @ gate.T
    return (raised * mx.sigmoid(raised) * (x @ up.T)) @ down.T


def _norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + eps) * weight


def _projected(x: mx.array, mtp: Weights, path: str, heads: int) -> mx.array:
    """[L, D] to [H, L, W]."""
    return (x @ mtp[f"{path}.weight"].T).reshape(x.shape[0], heads, -1).swapaxes(0, 1)


def _rotated(x: mx.array, width: int, base: float) -> mx.array:
    """Turns the first `width` numbers of each row by its place."""
    half = width // 2
    angles = mx.arange(x.shape[-2])[:, None] * base ** (-mx.arange(half) / half)
    cosines, sines = mx.cos(angles), mx.sin(angles)
    one, two = x[..., :half], x[..., half:width]
    return mx.concatenate([one * cosines - two * sines, two * cosines + one * sines, x[..., width:]], axis=-1)


def _attended(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """[H, L, W] each, with two heads of queries for each of keys and values."""
    keys, values = (mx.repeat(part, 2, axis=0) for part in (keys, values))
    scores = queries @ keys.swapaxes(-1, -2) / queries.shape[-1] ** 0.5
    length = scores.shape[-1]
    visible = mx.arange(length)[:, None] >= mx.arange(length)
    return mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1) @ values
