"""Records the logits of mlx-vlm for a prompt with a picture, so that the test needs no mlx-vlm.

    python -m tests.model.media.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
import types
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.lib.mlx_vlm import module, register
from tests.lib.seeing import END, SOFT, START, Parts, Shown, fresh, places_of, seeing, tokens_of, words

QWEN, GEMMA = "qwen3.5-seeing", "gemma4-seeing"
PARTS: Parts = [[*words(5), START], Shown(3, 4), [END, *words(4, 2)]]
RECORDED = Path(__file__).parent / "recorded.safetensors"


def qwen() -> mx.array:
    """Returns the logits [L, V] of the prompt, with positions in three channels of mlx-vlm's own."""
    config: Any = seeing(QWEN).opened.config
    rope = {"type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}
    text = module("qwen3_5.config").TextConfig.from_dict({**config["text_config"], "rope_parameters": rope})
    around = {f"{kind}_token_id": config.get(f"{kind}_token_id", -1) for kind in ("image", "video", "vision_start")}
    whole = types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2), **around)
    model = _filled(module("qwen3_5.language").LanguageModel(text, whole), QWEN)
    tokens = mx.array([tokens_of(PARTS)])
    positions, _ = model.get_rope_index(tokens, mx.array([[1, 6, 8]]), None, mx.ones_like(tokens))
    found: mx.array = model(tokens, inputs_embeds=_rows(model, 1.0), position_ids=positions).logits[0]
    return found


def gemma() -> mx.array:
    """Returns the logits [L, V] of the prompt for a model whose pictures are seen from behind them alone."""
    config: Any = seeing(GEMMA).opened.config
    text = module("gemma4.config").TextConfig.from_dict(config["text_config"])
    model = _filled(module("gemma4.language").LanguageModel(text), GEMMA)
    ids = mx.array([[0 if token == SOFT else token for token in tokens_of(PARTS)]])
    inputs = model.model.get_per_layer_inputs(ids)
    rows = _rows(model, model.model.embed_scale)
    found: mx.array = model(ids, inputs_embeds=rows, per_layer_inputs=inputs).logits[0]
    return found


def _filled(model: Any, name: str) -> Any:
    named = cast("list[tuple[str, mx.array]]", tree_flatten(fresh(name).parameters()))
    model.load_weights([(name.removeprefix("language_model."), array) for name, array in named])
    return model


def _rows(model: Any, scale: float) -> mx.array:
    rows = mx.array(model.model.embed_tokens(mx.array([tokens_of(PARTS)])) * scale)
    for place in places_of(PARTS):
        rows[:, place.start : place.stop] = place.shown.features()
    return rows


if __name__ == "__main__":
    register(Path(sys.argv[1]), ("qwen3_5", "qwen3_vl", "gemma4"))
    mx.save_safetensors(str(RECORDED), {QWEN: qwen(), GEMMA: gemma()})
