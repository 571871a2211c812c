"""The sight of a model of mlx-vlm: starts the processor, computes features with the tower, runs the forward over them.

Owner: the engine thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx

from runner.engine.parts import Parts
from runner.errors import ComputeError, MediaError, ModelError, RunnerError
from runner.logs import Log
from runner.media.encoder import MediaEncoder
from runner.media.forward import FeatureRows, plain_ids
from runner.media.open import Sight
from runner.media.prompt import Item, MediaNames, Picture
from runner.media.row_store import MediaRows, RowStore
from runner.media.support import MediaSupport
from runner.model import OpenedModel
from runner.vlm.module import Served, offsets
from runner.vlm.pictures import PLACEHOLDERS, Expansion, VlmPictures, VlmRows
from runner.vlm.process import BFLOAT16, PART, Prepared, Preparer, Setup
from runner.vlm.source import VlmChoice

log = Log(__name__)
_KNOWN = {
    "inputs_embeds",
    "visual_pos_masks",
    "deepstack_visual_embeds",
    "position_ids",
    "rope_deltas",
    "attention_mask_4d",  # no text model of mlx-vlm uses this mask
}
"""The fields that are handled in a package's result for a prompt with pictures."""
_SCORE_BYTES, _COPIES = 4, 16
_SMALL = 64
_BASE, _NOTES = 128, 4
"""The notes beside features hold an id as three digits of base `_BASE`, each of them exact in 16 bits."""
_TEXTS = (".json", ".jinja", ".txt", ".model")
"""The endings of files that a processor may need. Programs of a model's publisher are left out."""


class VlmTower:
    """The tower of a model of mlx-vlm, which computes a picture in one piece.

    Features are [tokens, (1 + layers) x width + 4]: for each token of a picture its embedding, the rows to add after
    the first layers, and 4 notes: the token's id in three digits, and 1 if the token stands for the picture.
    """

    def __init__(self, module: Served, pictures: VlmPictures) -> None:
        self._module = module
        self._pictures = pictures

    def needed_bytes(self, item: Item) -> int:
        patches = item.tokens * 4
        return patches * patches * _SCORE_BYTES + patches * self._module.width * _COPIES * _SCORE_BYTES

    def parts(self, item: Item, rows: MediaRows) -> Iterator[mx.array]:
        assert isinstance(item, Picture)
        expansion = self._pictures.expansion(item.header)
        arrays = {name: mx.array(each) for name, each in cast("VlmRows", rows).arrays.items()}
        features = encoded(self._module, expansion, named_arrays(arrays))
        first = len(expansion.before)
        yield features[first : first + len(expansion.own)]


def named_arrays(arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """Returns arrays by their names as arguments of a package. Puts the arrays of nested lists into lists again."""
    found: dict[str, Any] = {}
    for title, array in arrays.items():
        name = title.removesuffix(BFLOAT16)
        if name != title:
            array = array.view(mx.bfloat16)
        base, *places = name.split(PART)
        if not places:
            found[name] = array
            continue
        inner = found.setdefault(base, [])
        for place in map(int, places[:-1]):
            if place == len(inner):
                inner.append([])
            inner = inner[place]
        inner.append(array)
    return found


def encoded(module: Served, expansion: Expansion, arrays: dict[str, Any]) -> mx.array:
    """Returns the lazy features of all tokens of an expansion. Raises ComputeError for a result with unknown fields."""
    tokens = mx.array([expansion.asked])
    model = cast("Any", module)
    found = model.get_input_embeddings(tokens, arrays.pop("pixel_values"), mask=mx.ones_like(tokens), **arrays)
    made = {name: value for name, value in found.to_dict().items() if value is not None}
    if bool(made.get("attention_mask", tokens >= 0).all()):
        made.pop("attention_mask", None)  # this mask hides nothing
    if unknown := made.keys() - _KNOWN:
        raise ComputeError(f"pictures have results of unknown kinds: {', '.join(sorted(unknown))}")
    tokens = mx.array([expansion.ids])
    embeddings = made["inputs_embeds"].reshape(tokens.size, -1)
    masks = made.get("visual_pos_masks")
    seen = mx.zeros(tokens.size, mx.bool_) if masks is None else masks.reshape(-1)
    notes = [tokens[0] // _BASE**2, tokens[0] // _BASE % _BASE, tokens[0] % _BASE, seen]
    written = mx.stack([each.astype(embeddings.dtype) for each in notes], axis=1)
    added = made.get("deepstack_visual_embeds")
    added = getattr(added, "embeddings", added)
    if added is None:
        return mx.concatenate([embeddings, written], axis=1)
    if module.deepstack == "tokens":
        columns = [added[0, :, layer].astype(embeddings.dtype) for layer in range(added.shape[2])]
    elif module.deepstack == "prompt":
        columns = [each.astype(embeddings.dtype) for each in added]
    else:
        places = mx.array([index for index, each in enumerate(cast("list[bool]", seen.tolist())) if each])
        columns = [mx.zeros_like(embeddings).at[places].add(each.astype(embeddings.dtype)) for each in added]
    return mx.concatenate([embeddings, *columns, written], axis=1)


class VlmForward:
    """Forwards of a model of mlx-vlm over a prompt with pictures."""

    def __init__(self, module: Served) -> None:
        self._module = module
        self.shifted = module.shifted

    def __call__(
        self,
        tokens: Sequence[int],
        layers: list[object],
        rows: Sequence[FeatureRows],
        positions: Sequence[Sequence[int]] | None,
        forward: Callable[[mx.array, list[object]], mx.array],
    ) -> mx.array:
        """Returns the lazy logits [1, L, V] of a part of a prompt. The arguments are those of `MediaForward`."""
        ids = plain_ids(tokens, rows)
        parts: dict[str, object] = {}
        places = self._module.keeps_caches
        if rows:
            embeddings = self._module.embeddings(ids)
            added: list[mx.array] = []  # to the only entry of `rows`, which covers the forward if there are additions
            seen = mx.zeros(ids.shape, mx.bool_)
            for start, stop, features, _ in rows:
                width = embeddings.shape[-1]
                own, *beside = mx.split(features[:, :-_NOTES], features.shape[-1] // width, axis=-1)
                notes = features[:, -_NOTES:].astype(mx.int32)
                ids[:, start:stop] = (notes * mx.array([_BASE**2, _BASE, 1, 0])).sum(axis=-1)[None]
                embeddings = mx.concatenate(
                    [embeddings[:, :start], own.astype(embeddings.dtype)[None], embeddings[:, stop:]], axis=1
                )
                seen[:, start:stop] = notes[:, -1].astype(mx.bool_)[None] if places else True
                added = beside
            parts["inputs_embeds"] = embeddings
            if added:
                parts |= self._deepstack(added, seen, next(offsets(layers)))
            elif places:
                parts["visual_pos_masks"] = seen
        if positions is not None:
            parts["position_ids"] = mx.array([*map(list, positions)])[:, None]
        with self._module.during(parts):
            return forward(ids, layers)

    def _deepstack(self, added: list[mx.array], seen: mx.array, offset: int | mx.array) -> dict[str, object]:
        """Returns the additions to some layers, and their places, in the form that the text model expects."""
        form, made = self._module.deepstack, cast("object", added)
        if form == "tokens":
            made = mx.stack(added, axis=1)[None]
        if form == "prompt":
            before = int(offset)
            made = mx.pad(mx.stack(added), [(0, 0), (before, 0), (0, 0)])
            seen = mx.pad(seen, [(0, 0), (before, 0)])
        return {"visual_pos_masks": seen, "deepstack_visual_embeds": made}


def open_vlm_sight(parts: Parts) -> Sight:
    """Starts the processor of a model of mlx-vlm. The tower was loaded with the model. Logs the reason if the processor
    does not work."""
    model, module = parts.model, cast("Served", parts.loaded.module)
    if parts.settings.no_media:
        return Sight(why="the runner was started with --no-media")
    if why := VlmChoice.of(parts.settings).blindness(model.config):
        return Sight(why="" if why == "a text model" else why)
    try:
        preparer = Preparer(setup_of(model))
        preparer.start()
        pictures = pictures_of(model, module, preparer)
    except RunnerError as error:
        log.warning("the model sees no pictures", why=str(error))
        return Sight(why=f"its vision is unavailable: {error}")
    log.info("the model sees pictures", tower=model.family.import_name)
    store = RowStore(pictures)
    tower, forward = VlmTower(module, pictures), VlmForward(module)
    encoder = MediaEncoder(tower, store, forward, partial(parts.post, None), splits=True)
    return Sight(MediaSupport(pictures, MediaNames(), store), encoder)


def setup_of(model: OpenedModel) -> Setup:
    """Returns the setup of a model's processor. Raises ModelError for a package that is not in PLACEHOLDERS."""
    package = model.family.module
    if package not in PLACEHOLDERS:
        raise ModelError(f"no placeholder for pictures is known for {package}")
    files = {name: model.file(name) for name in model.checkpoint.files if name.endswith(_TEXTS)}
    return Setup(package, PLACEHOLDERS[package], {name: each for name, each in files.items() if each is not None})


def pictures_of(model: OpenedModel, module: Served, preparer: Preparer) -> VlmPictures:
    """Returns the preparation of pictures for a model. Raises ModelError if a small picture cannot be prepared."""
    try:
        measured = preparer.measure(_SMALL, _SMALL, bool)
    except MediaError as error:
        raise ModelError(str(error)) from error
    return VlmPictures(
        model.family.module,
        version("mlx-vlm"),
        preparer,
        model.config,
        module.picture_tokens,
        mrope=module.takes_positions and not module.flat and bool(measured.grid),
        tokens=_made_of_one(module, measured) if module.one_token else 0,
    )


def _made_of_one(module: Served, measured: Prepared) -> int:
    """Returns the number of embeddings that a model makes of the single token of a picture."""
    arrays = named_arrays({name: mx.zeros(shape) for name, _, shape in measured.shapes})
    ids = mx.array([measured.ids])
    found = cast("Any", module).get_input_embeddings(ids, arrays.pop("pixel_values"), mask=mx.ones_like(ids), **arrays)
    return int(found.inputs_embeds.shape[1]) - ids.size + 1
