"""Records what mlx-vlm makes of the cases, so that the tests need no mlx-vlm.

    python -m tests.model.drafts.dflash.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import mlx.core as mx

from scripts.tools.models.dflash import DFLASH2, DRAFT, DSPARK, GLIMMER, LAGUNA, dflash_config, dflash_weights
from scripts.tools.models.sources_form import Config
from tests.lib.mlx_vlm import register
from tests.model.drafts.dflash.cases import ANCHOR, CASES, CHAINED, RECORDED, steps, tables

_DRAFTERS = "mlx_vlm.speculative.drafters"
_NAMES = {
    DRAFT: "qwen3_dflash", LAGUNA: "laguna_dflash", GLIMMER: "muse_glimmer_assistant",
    DFLASH2: "dflash2", DSPARK: "dspark",
}  # fmt: skip
_CHAINED = (DFLASH2, DSPARK)


def drafter(config: Config, architecture: str) -> Any:
    """mlx-vlm's draft of a config."""
    package = f"{_DRAFTERS}.{_NAMES[architecture]}"
    settings = importlib.import_module(f"{package}.config")
    classes = importlib.import_module(f"{package}.{_NAMES[architecture] if architecture in _CHAINED else 'dflash'}")
    if architecture in _CHAINED:
        kind = "DFlash2" if architecture == DFLASH2 else "DSpark"
        made = getattr(settings, f"{kind}Config").from_dict({"num_target_layers": 2, **config})
        return getattr(classes, f"{kind}DraftModel")(made)
    if architecture == GLIMMER:
        return classes.MuseGlimmerAssistantDraftModel(settings.MuseGlimmerAssistantConfig.from_dict({
            **config, "num_target_layers": 2, "vocab_size": 64,
        }))  # fmt: skip
    if architecture == LAGUNA:
        nested = config["dflash_config"]
        assert isinstance(nested, dict)
        made = settings.DFlashConfig.from_dict({
            **config, "eagle_aux_hidden_state_layer_ids": [0, 1], "dflash_config": {**nested, "num_target_layers": 2},
        })  # fmt: skip
        layer = classes.LagunaDFlashDecoderLayer
        plain = layer.__call__

        def normalized(self: Any, x: mx.array, context: mx.array, *rest: Any) -> mx.array:
            """As vLLM, SGLang and Ollama do. mlx-vlm leaves it out, which the published weights, all 1, permit."""
            return plain(self, x, self.input_layernorm(context), *rest)  # type: ignore[no-any-return]

        layer.__call__ = normalized
        return classes.LagunaDFlashDraftModel(made)
    made = settings.DFlashConfig.from_dict(config)
    made.rope_is_neox_style = config.get("rope_interleaved") is not True
    return classes.DFlashDraftModel(made)


def filled(config: Config, architecture: str) -> Any:
    """The same with its weights."""
    model, weights = drafter(config, architecture), dflash_weights(config)
    if architecture in (DRAFT, *_CHAINED):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()))
    return model


def drafts(config: Config, architecture: str) -> mx.array:
    """The best drafts after each step, one below the other."""
    model, found = filled(config, architecture), []
    cache, (embeddings, output) = model.make_cache(), tables()
    model.embed_tokens, model.lm_head = lambda ids: embeddings[ids], lambda x: x @ output.T
    for step in steps():
        count = min(step.embedded.shape[1], model.config.block_size)
        chosen = model.draft_block(ANCHOR, step.features, cache, count, lambda logits: mx.argmax(logits, axis=-1))
        found.append(chosen[0])
    return mx.concatenate(found)


def states(config: Config, architecture: str) -> mx.array:
    """The states of all blocks, one below the other."""
    model, blocks = filled(config, architecture), []
    cache = model.make_cache()
    for step in steps():
        factor = getattr(model.config, "input_embedding_scale", 1.0)
        model.embed_tokens = lambda _, rows=step.embedded / factor: rows
        blocks.append(model._hidden(None, step.features, cache)[0])
    return mx.concatenate(blocks)


def main() -> None:
    mx.disable_compile()
    register(Path(sys.argv[1]), ())
    for name in ("", *(f".{name}" for name in _NAMES.values() if name not in ("dflash2", "dspark"))):
        package = types.ModuleType(_DRAFTERS + name)
        package.__path__ = [str(Path(sys.argv[1]).joinpath(*package.__name__.split(".")))]
        sys.modules[package.__name__] = package
    recorded = {}
    for name, (architecture, changes) in CASES.items():
        recorded[name] = states(dflash_config(architecture, changes), architecture)
        if name in CHAINED:
            recorded[f"{name}: drafts"] = drafts(dflash_config(architecture, changes), architecture)
    mx.save_safetensors(str(RECORDED), recorded)


if __name__ == "__main__":
    main()
