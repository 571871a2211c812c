"""Rows of models with packed weights: in a batch each has the logits that it has alone, to the bit.

Products with packed weights round their rows to 16 bits, so that a difference in the last bit of a number can become
one of 1e-4 in a logit.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map

from runner.cache.layers.batched import BatchedLayers
from runner.model.forwards import replace_forwards
from scripts.tools.models.tiny import VOCAB, Forward, words
from tests.lib.kernels import calls

from mlx_lm.models.cache import make_prompt_cache  # isort: skip

LENGTHS = (40, 3, 100, 64, 17, 33, 70, 129)
"""Tokens of prompts, before and after a window of 32 is full."""
_DECODER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


class Kind(NamedTuple):
    """mlx-lm's module, how its weights are packed, and the types of scales and of all else that is computed."""

    module: str
    bits: int
    group: int
    scales: str = "float32"
    numbers: str = "float32"
    mode: str = "affine"


KINDS = (
    Kind("llama", 4, 32),
    Kind("gemma3_text", 4, 64),
    Kind("deepseek_v3", 4, 32),
    *(
        pytest.param(kind, marks=pytest.mark.full)
        for kind in (
            Kind("llama", 8, 64, "float16"),
            Kind("llama", 4, 128, "bfloat16"),
            Kind("llama", 4, 64, "bfloat16", "bfloat16"),
            Kind("llama", 6, 64),
            Kind("qwen2", 4, 32, mode="mxfp4"),
            Kind("qwen3", 8, 32, "float16", "float16"),
            Kind("gemma", 4, 64),
            Kind("gemma3_text", 8, 32, "bfloat16", "bfloat16"),
            Kind("gpt_oss", 4, 32),
            Kind("qwen3_moe", 4, 64),
            Kind("mixtral", 8, 64),
        )
    ),
)


def made(kind: Kind) -> Forward:
    module = importlib.import_module(f"mlx_lm.models.{kind.module}")
    replace_forwards()
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({**_DECODER, "model_type": kind.module}))

    def spread(x: mx.array) -> mx.array:
        return x if x.ndim < 2 else mx.random.normal(x.shape, scale=2 / x.shape[-1] ** 0.5)

    model.update(tree_map(lambda x: spread(x).astype(getattr(mx, kind.numbers)), model.parameters()))
    quantize(model, kind.group, kind.bits, mode=kind.mode)
    for layer in model.modules():
        if kind.mode == "affine" and hasattr(layer, "bits"):
            layer.scales, layer.biases = (x.astype(getattr(mx, kind.scales)) for x in (layer.scales, layer.biases))
    mx.eval(model.parameters())
    return model  # type: ignore[no-any-return]


def said(model: Forward, tokens: Sequence[Sequence[int]], layers: list[object]) -> mx.array:
    """Returns the logits [B, L, VOCAB] of tokens [B, L] on top of what the layers hold."""
    logits = model(mx.array([[*row] for row in tokens]), cache=layers)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_row_has_the_logits_that_it_has_alone(kind: Kind) -> None:
    """With one to eight rows, after forwards over one token of each, and after a round of which each keeps others."""
    mx.disable_compile()
    model = made(kind)
    rows = [list[object](make_prompt_cache(model)) for _ in LENGTHS]
    for row, (layers, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        said(model, [words(length, seed=row)], layers)
    answers = [words(7, seed=row + 20) for row in range(len(rows))]
    kept = [3 - row % 3 for row in range(len(rows))]  # of a round over the tokens 2, 3, and 4
    together = []
    before = calls()
    for count in range(1, len(rows) + 1):
        batch = BatchedLayers(rows[:count])
        logits = [said(model, [[each[step]] for each in answers[:count]], batch.layers) for step in range(2)]
        with batch.draft_round(3):
            logits.append(said(model, [each[2:5] for each in answers[:count]], batch.layers))
        batch.accept(kept[:count])
        logits += [said(model, [[each[step]] for each in answers[:count]], batch.layers) for step in (5, 6)]
        together.append(mx.concatenate(logits, axis=1))
    assert calls() > before
    for row, (layers, answer, right) in enumerate(zip(rows, answers, kept, strict=True)):
        tokens = [*range(2 + right), 5, 6]
        alone = mx.concatenate([said(model, [[answer[token]]], layers) for token in tokens], axis=1)[0]
        for company in together[row:]:
            beside = company[row, mx.array(tokens)]
            assert mx.sum(beside != alone).item() == 0, (row, len(company), mx.abs(beside - alone).max(axis=-1))
