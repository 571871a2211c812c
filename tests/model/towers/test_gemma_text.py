"""Facts about mlx-lm's Gemma 4 and Glimmer that features in place of embeddings must undo.

The embedding table is replaced, as an integration would do it; a dense computation of our own says what is right.
"""

from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__
from scripts.tools.models.sources_form import Config
from scripts.tools.models.towers_gemma import SEEING

from mlx_lm.models import gemma4, muse_glimmer  # isort: skip

SOFT = slice(3, 7)
TEXT = mx.array([[5, 9, 60, 0, 0, 0, 0, 61, 11, 4]])
TOLERANCE = 1e-6


class Seeing:
    """In place of a table: looks ids up and overwrites the rows of a picture; all else is the table's."""

    def __init__(self, table: Any, rows: mx.array) -> None:
        self.table, self.rows, self.asked = table, rows, cast("list[mx.array]", [])

    def __call__(self, ids: mx.array) -> mx.array:
        self.asked.append(ids)
        found = mx.array(self.table(ids))
        found[:, SOFT] = self.rows
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


def _made(model: Any, seed: int = 1) -> Any:
    """The model with random weights that make all of it matter."""
    mx.random.seed(seed)
    for name, array in cast("list[tuple[str, mx.array]]", _flat(model)):
        model.load_weights([(name, 0.3 * mx.random.normal(array.shape) + (array.ndim == 1))], strict=False)
    return model


def _flat(model: Any) -> Any:
    return tree_flatten(model.parameters())


def _gemma4(name: str) -> Any:
    return _made(gemma4.Model(gemma4.ModelArgs.from_dict(_copy(SEEING[name].module))))


def _copy(config: Config) -> Config:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}


def _features(width: int = 64) -> mx.array:
    mx.random.seed(7)
    return 3 * mx.random.normal((SOFT.stop - SOFT.start, width))


def _away(found: mx.array, wanted: mx.array) -> float:
    return cast("float", (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item())


def _layers(inner: Any, hidden: mx.array, ids: mx.array, sliding: mx.array | None = None) -> mx.array:
    """Returns the output of Gemma 4's layers for right hidden states [1, L, width], with per-layer inputs of `ids`.

    `sliding` is a mask for the sliding layers in place of theirs.
    """
    per_layer = [None] * len(inner.layers)
    if inner.hidden_size_per_layer_input:
        inputs = inner._project_per_layer_inputs(hidden, inner._get_per_layer_inputs(ids))
        per_layer = [inputs[:, :, index] for index in range(len(inner.layers))]
    masks = inner._make_masks(hidden, [None] * len(inner.layers))
    if sliding is not None:
        kinds = (layer.layer_type for layer in inner.layers)
        masks = [sliding if kind == "sliding_attention" else mask for kind, mask in zip(kinds, masks, strict=True)]
    kept: list[Any] = []
    for layer, mask, source, inputs in zip(inner.layers, masks, inner.previous_kvs, per_layer, strict=True):
        shared, offset = kept[source] if source < len(kept) else (None, None)
        hidden, keys, offset = layer(hidden, mask, None, per_layer_input=inputs, shared_kv=shared, offset=offset)
        kept.append((keys, offset))
    return cast("mx.array", inner.embed_tokens.as_linear(inner.norm(hidden)))


def _capped(logits: mx.array, cap: float) -> mx.array:
    return mx.tanh(logits / cap) * cap


@pytest.mark.parametrize("name", ["gemma4-seeing", "gemma4-moe-seeing", "gemma4-unified-seeing"])
def test_gemma4_wants_features_divided_by_its_scale(name: str) -> None:
    model = _gemma4(name)
    inner, rows = model.language_model.model, _features()
    assert inner.embed_scale == 64**0.5
    hidden = mx.array(inner.embed_tokens(TEXT) * inner.embed_scale)
    hidden[:, SOFT] = rows
    wanted = _capped(_layers(inner, hidden, TEXT), 30.0)
    table = inner.embed_tokens
    for scale, right in ((inner.embed_scale, True), (1.0, False)):
        inner.embed_tokens = Seeing(table, rows / scale)
        found = model(TEXT)
        inner.embed_tokens = table
        assert (_away(found, wanted) <= TOLERANCE) is right
    taken = model(TEXT, input_embeddings=mx.where(_soft(), _wide(rows) / inner.embed_scale, table(TEXT)))
    assert _away(taken, wanted) <= TOLERANCE  # the other way in


@pytest.mark.parametrize("name", ["gemma4-moe-seeing", "gemma4-unified-seeing"])
def test_gemma4s_sliding_layers_take_their_mask_from_the_first_of_their_caches(name: str) -> None:
    model = _gemma4(name)
    inner, rows = model.language_model.model, _features()
    places = mx.arange(TEXT.shape[1])
    soft = (places >= SOFT.start) & (places < SOFT.stop)
    both_ways = (places[:, None] >= places) | (soft[:, None] & soft)
    hidden = mx.array(inner.embed_tokens(TEXT) * inner.embed_scale)
    hidden[:, SOFT] = rows
    wanted = _capped(_layers(inner, hidden, TEXT, both_ways), 30.0)
    inner.embed_tokens = Seeing(inner.embed_tokens, rows / inner.embed_scale)
    causal = model(TEXT, cache=model.make_cache())
    layers = model.make_cache()
    asked: list[tuple[int, int | None]] = []

    def make_mask(count: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        asked.append((count, window_size))
        return both_ways

    first = next(index for index, layer in enumerate(inner.layers) if layer.layer_type == "sliding_attention")
    layers[first].make_mask = make_mask
    assert _away(model(TEXT, cache=layers), wanted) <= TOLERANCE
    assert asked == [(TEXT.shape[1], inner.window_size)]
    assert _away(causal, wanted) > 1e-3


def _soft() -> mx.array:
    places = mx.arange(TEXT.shape[1])
    return ((places >= SOFT.start) & (places < SOFT.stop))[None, :, None]


def _wide(rows: mx.array) -> mx.array:
    before, behind = SOFT.start, TEXT.shape[1] - SOFT.stop
    return mx.pad(rows, [(before, behind), (0, 0)])[None]


def test_only_gemma4s_inputs_for_each_layer_look_the_ids_up_again() -> None:
    rows = _features()
    other = mx.array(TEXT)
    other[:, SOFT] = 62  # the id of a soft token instead of 0
    for name, matters in (("gemma4-seeing", True), ("gemma4-moe-seeing", False), ("gemma4-unified-seeing", False)):
        model = _gemma4(name)
        inner = model.language_model.model
        assert bool(inner.hidden_size_per_layer_input) is matters
        inner.embed_tokens = Seeing(inner.embed_tokens, rows / inner.embed_scale)
        assert (_away(model(other), model(TEXT)) > 1e-3) is matters
        assert len(inner.embed_tokens.asked) == 2  # once in each forward; the output uses as_linear
        if matters:  # the second table gets the ids themselves, not what the first one was asked for
            assert inner.embed_tokens_per_layer(TEXT).shape == (1, TEXT.shape[1], len(inner.layers) * 16)


def test_a_table_that_sees_is_no_parameter_of_the_module() -> None:
    model = _gemma4("gemma4-seeing")
    inner = model.language_model.model
    names = {name for name, _ in _flat(inner)}
    inner.embed_tokens = Seeing(inner.embed_tokens, _features())
    assert names - {name for name, _ in _flat(inner)} == {"embed_tokens.weight"}
    assert "embed_tokens" not in Module.children(inner)


def test_glimmer_norms_what_stands_in_for_embeddings() -> None:
    config = SEEING["glimmer-seeing"].module
    model = _made(muse_glimmer.Model(muse_glimmer.ModelArgs.from_dict(_copy(config))))
    inner, rows = model.model, _features()
    assert not hasattr(inner, "embed_scale")
    hidden = mx.array(mx.fast.rms_norm(inner.embed_tokens(TEXT), None, inner.embed_eps))
    hidden[:, SOFT] = mx.fast.rms_norm(rows, None, inner.embed_eps)  # as transformers' perception_emb_norm does
    cache = [None] * len(inner.layers)
    for layer, mask in zip(inner.layers, inner._masks(hidden, cache), strict=True):
        hidden = layer(hidden, mask, None)
    wanted = _capped(model.lm_head(inner.norm(hidden)) * model.args.output_multiplier, 20.0)

    table = inner.embed_tokens
    inner.embed_tokens = Seeing(table, rows)
    assert _away(model(TEXT), wanted) <= TOLERANCE
    inner.embed_tokens = Seeing(table, mx.fast.rms_norm(rows, None, inner.embed_eps))
    assert _away(model(TEXT), wanted) <= 1e-4  # twice is almost once, but for the epsilon
    small = 1e-2 * rows
    inner.embed_tokens = Seeing(table, small)
    once = model(TEXT)
    inner.embed_tokens = Seeing(table, mx.fast.rms_norm(small, None, inner.embed_eps))
    assert _away(model(TEXT), once) > 1e-4
