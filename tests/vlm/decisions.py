"""Tiny models that decide, in a store, and what mlx-vlm's own classes make of the same tensors."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from runner.model.weights.parameters import parameters_of
from runner.vlm.module import import_package
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from scripts.tools.models.tokenizers import byte_level, vocabulary_size

Config = dict[str, Any]
MARKS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
_TOKENS = byte_level([bytes([value]) for value in range(256)], (*MARKS, "<|im_start|>", "<|im_end|>"))
_ROWS = vocabulary_size(_TOKENS)
MOST = 192
LAYA: Config = {"architectures": ["LayaForDecision"], "model_type": "laya", "max_position_embeddings": MOST}
LAYA_PARTS: Mapping[str, Config] = {
    "encoder/config.json": {
        "model_type": "modernbert", "vocab_size": _ROWS, "hidden_size": 64, "num_hidden_layers": 4,
        "intermediate_size": 96, "num_attention_heads": 4, "global_attn_every_n_layers": 3, "local_attention": 8,
    },
    "rl_agent_config.json": {
        "head_layers": 2, "max_len": MOST, "head_max_len": 100, "temperature": [1.5, 0.7, 9.0],
        "temperature_by_options": {"choice:3-5": 0.9},
    },
}  # fmt: skip
CLEF: Config = {
    "architectures": ["ClefForDecision"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": _ROWS, "hidden_size": 64, "num_hidden_layers": 4,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
        "rope_parameters": {
            "type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
CLEF_PARTS: Mapping[str, Config] = {
    "joint_head_config.json": {
        "hidden_size": 64, "width": 32, "routing_layers": 2, "layers": 2, "heads": 4, "feedforward": 48,
    }
}  # fmt: skip


def laya_config() -> Config:
    """The config that mlx-vlm's class wants."""
    agent = LAYA_PARTS["rl_agent_config.json"]
    parts = {"encoder_config": LAYA_PARTS["encoder/config.json"], "decision_config": agent}
    return {"model_type": "laya", "head_layers": agent["head_layers"], **parts}


def clef_config() -> Config:
    """The same of Clef."""
    return {**CLEF, "head_config": CLEF_PARTS["joint_head_config.json"]}


def made(package: str, config: Config) -> Any:
    """Returns mlx-vlm's model with random weights, the same every time."""
    classes = import_package(package)
    args = classes.ModelConfig.from_dict(config)
    if package == "clef":
        args.text_config = classes.TextConfig.from_dict(config["text_config"])
        args.vision_config = classes.VisionConfig.from_dict({"depth": 1, "hidden_size": 32, "num_heads": 4})
    mx.random.seed(11)
    model = classes.Model(args)
    for name, array in parameters_of(model).items():
        # Wider weights make layers that amplify the last bit of a sum, which processors round differently.
        model.load_weights([(name, array * (array.ndim == 1) + 0.2 * mx.random.normal(array.shape))], strict=False)
    model.eval()
    return model


_SOURCE_NAMES = {
    "laya": (
        (r"\.attention\.(query|out)_proj\.", r".self_attn.\1_proj."), (r"^(scorer|act_head)\.layers\.", r"\1."),
    ),
    "clef": (
        (r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head", "lm_head"),
        (r"^head\.", ""), (r"(feedforward|residual_scorer)\.1\.", r"\1.3."),
    ),
}  # fmt: skip


def published(package: str, model: Module) -> dict[str, mx.array]:
    """Returns the tensors of a model under the names of their source."""
    found = {name: each for name, each in parameters_of(model).items() if not name.startswith("vision_tower.")}
    named = {}
    for name, array in found.items():
        if re.search(r"\.(key|value)_proj\.", name):
            continue
        if ".query_proj." in name:
            array = mx.concatenate([found[name.replace("query", part)] for part in ("query", "key", "value")])
        elif name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        for pattern, replacement in _SOURCE_NAMES[package]:
            name = re.sub(pattern, replacement, name)
        named[name.replace(".query_proj.", ".in_proj_")] = array
    return named


def write(package: str, models: Path, work: Path, quantization: Quantization | None = None) -> None:
    """Writes a model into a store, as `ollama create` does."""
    config, parts = (LAYA, LAYA_PARTS) if package == "laya" else (CLEF, CLEF_PARTS)
    work.mkdir(parents=True)
    (work / "config.json").write_text(json.dumps(config))
    made_of = laya_config() if package == "laya" else clef_config()
    mx.save_safetensors(str(work / "model.safetensors"), published(package, made(package, made_of)))
    store = write_store(models, package, work, quantization)
    for name, part in parts.items():
        store.put_json(name, part)
    store.put_json("tokenizer/tokenizer.json" if package == "laya" else "tokenizer.json", _TOKENS)


def own(package: str) -> Any:
    """Returns mlx-vlm's model as its own loader makes it of those tensors."""
    config = laya_config() if package == "laya" else clef_config()
    model = made(package, config)
    weights = model.sanitize(published(package, made(package, config)))
    model.load_weights([*weights.items()], strict=False)
    return model


def unpacked(model: Module) -> list[tuple[str, mx.array]]:
    """Returns the weights of packed layers as they are multiplied with. There is one at least."""
    found = []
    for name, layer in model.named_modules():
        if "scales" in layer:
            packed = cast("Any", layer)
            parts = (packed.weight, packed.scales, packed.biases, packed.group_size, packed.bits)
            found.append((f"{name}.weight", mx.dequantize(*parts, mode=packed.mode)))
    assert found
    return found


def tokenizer() -> Any:
    """Returns the tokenizer as mlx-vlm has it."""
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "mask", "pad")}
    return cast("Any", PreTrainedTokenizerFast)(tokenizer_object=Tokenizer.from_str(json.dumps(_TOKENS)), **names)


def laya_scores(model: Any, state: str, rows: Sequence[Config]) -> list[list[float]]:
    """Returns the scores of each row by mlx-vlm's own classes, each alone."""
    kinds = import_package("laya").laya
    asks = kinds.Laya(model, tokenizer())
    found = []
    for row in rows:
        ids, places = asks._sequence(state, {**row, "instructions": row["instructions"]}, row["options"])
        logits, _ = model(
            mx.array([ids]), mx.ones((1, len(ids)), mx.int32), mx.array([places]), mx.ones((1, len(places)), mx.bool_),
            mx.array([kinds.QUESTION_TYPES[row["type"]]]),
        )  # fmt: skip
        found.append(cast("list[float]", (logits[0] / temperature(row["type"], len(places))).tolist()))
    return found


def temperature(kind: str, options: int) -> float:
    """What the scores of such a question are divided by."""
    if kind == "choice" and 3 <= options <= 5:
        return 0.9
    return {"choice": 1.5, "score": 0.7, "noul": 5.0}[kind]


def clef_scores(model: Any, segments: Sequence[str], fields: Sequence[Config]) -> list[list[float]]:
    """Returns the scores of each field by mlx-vlm's own classes."""
    parts = [tokenizer()(segment, add_special_tokens=False)["input_ids"] for segment in segments]
    ends = [sum(map(len, parts[:number])) for number in range(len(parts) + 1)]

    def tokens(span: Sequence[int]) -> tuple[int, int]:
        return ends[span[0]], ends[span[1]]

    logits = model(
        mx.array([[token for part in parts for token in part]]),
        [(tokens(field["question"]), len(field["options"])) for field in fields],
        [tokens(option) for field in fields for option in field["options"]],
        mx.array([field["type"] for field in fields]),
    ).tolist()
    assert all(map(math.isfinite, logits))
    counts = [len(field["options"]) for field in fields]
    return [logits[sum(counts[:number]) : sum(counts[: number + 1])] for number in range(len(counts))]
