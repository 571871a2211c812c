"""The tower of Nemotron-H omni: RADIO v2.5-h or C-RADIO v4-h, and the projector after it."""

import math
from collections.abc import Iterator

import mlx.core as mx
from mlx.nn.layers.activations import gelu, relu
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from runner.errors import ModelError, UnknownError
from runner.media.families import NemotronH
from runner.media.towers.block import CORNERS, NORM_EPS, PlainBlock, head_width, interpolated
from runner.media.towers.tower import Grid, Tower, in_pieces
from runner.model.fields import Config, section, size, small_count

_RADIO = r"(?:model\.)?vision_model\.radio_model\.model\."
_PATCHES = rf"{_RADIO}patch_generator\."
_PROJECTOR = r"(?:model\.)?mlp1\.(?:layers\.)?"
_VERSIONS = ("", "radio_v2.5-h", "c-radio_v4-h")
_CHANNELS = 3
_PATCH = 16
_MERGE = 2
_PROJECTOR_EPS = 1e-5
_CLIP = {"norm_mean": (0.48145466, 0.4578275, 0.40821073), "norm_std": (0.26862954, 0.26130258, 0.27577711)}


class NemotronTower(Tower):
    """A transformer and a projector. Patches go row by row; the values of each are ordered channel, y, x."""

    family = NemotronH
    names = (
        (rf"{_PATCHES}embedder\.", "patch_embed."),
        (rf"{_PATCHES}cls_token\.token$", "class_tokens"),
        (rf"{_PATCHES}pos_embed$", "positions"),
        (rf"{_RADIO}blocks\.", "blocks."),
        (r"(?:model\.)?(?:vision_projector\.)?vision_final_layernorm\.", "final_norm."),
        (rf"{_PROJECTOR}0\.", "projector_norm."),
        (rf"{_PROJECTOR}1\.", "fc1."),
        (rf"{_PROJECTOR}3\.", "fc2."),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        part = section(config, "vision_config")
        _check_form(config, part)
        width = size(part, "hidden_size", size(config, "vit_hidden_size", 1280))
        heads, hidden = size(part, "num_attention_heads", 16), size(part, "intermediate_size", 4 * width)
        projected = size(config, "projector_hidden_size", 4096)
        joined = _MERGE * _MERGE * width
        head_width(width, heads)
        # The underscores keep both arrays out of the parameters.
        self._mean, self._spread = (mx.array(_triplet(config, key))[:, None] for key in _CLIP)
        self.by_columns = config.get("ps_version", "v1") == "v1"
        self.patch_embed = Linear(_CHANNELS * _PATCH * _PATCH, width, bias=False)
        self.class_tokens = mx.zeros((1, width))
        self.positions = mx.zeros((1, 1, width))
        layers = small_count(part, "num_hidden_layers", 32)
        self.blocks = [PlainBlock(width, hidden, heads, gelu) for _ in range(layers)]
        if config.get("vision_final_layernorm") is True:
            self.final_norm = LayerNorm(width, eps=NORM_EPS)
        self.projector_norm = RMSNorm(joined, eps=_PROJECTOR_EPS)
        self.fc1 = Linear(joined, projected, bias=False)
        self.fc2 = Linear(projected, self.width, bias=False)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Fits the module to the tensors: the numbers of class tokens and positions, and a last norm if one exists."""
        width = self.projector_norm.weight.size // _MERGE**2
        tokens, positions = weights.get("class_tokens"), weights.get("positions")
        if tokens is not None and tokens.ndim == 2:
            self.class_tokens = mx.zeros((tokens.shape[0], width))
        if positions is not None and positions.ndim == 3 and math.isqrt(positions.shape[1]) ** 2 == positions.shape[1]:
            self.positions = mx.zeros((1, positions.shape[1], width))
        if "final_norm.weight" in weights:
            self.final_norm = LayerNorm(width, eps=NORM_EPS)
        return weights

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        dtype, width = self.projector_norm.weight.dtype, self.projector_norm.weight.size // _MERGE**2
        side, longest = math.isqrt(self.positions.shape[1]), max(grid)
        row_at, column_at = ((place + 0.5) * side / longest - 0.5 for place in grid.places())
        table = self.positions[0]

        def embedded(which: slice) -> mx.array:
            values = patches[which].reshape(-1, _CHANNELS, _PATCH * _PATCH).astype(mx.float32) / 255
            values = ((values - self._mean) / self._spread).flatten(1).astype(dtype)
            place = interpolated(lambda index: table[index], (side, side), row_at[which], column_at[which])
            return self.patch_embed(values) + place.astype(dtype)

        row_bytes = CORNERS * max(width, patches.shape[1]) * 4
        x = yield from in_pieces(embedded, patches.shape[0], row_bytes, self.piece_bytes)
        x = mx.concatenate([self.class_tokens.astype(dtype), x])
        yield x
        for block in self.blocks:
            x = yield from block.steps(x, self.piece_bytes)
            yield x
        x = x[self.class_tokens.shape[0] :]
        if "final_norm" in self:
            x = self.final_norm(x)
        x = x.reshape(grid.rows // _MERGE, _MERGE, grid.columns // _MERGE, _MERGE, width)
        joined = x.transpose(*((2, 0) if self.by_columns else (0, 2)), 1, 3, 4).reshape(-1, _MERGE**2 * width)

        def projected(which: slice) -> mx.array:
            return self.fc2(relu(self.fc1(self.projector_norm(joined[which]))) ** 2)

        widest = max(joined.shape[1], self.fc1.weight.shape[0]) * joined.itemsize
        yield (yield from in_pieces(projected, joined.shape[0], widest, self.piece_bytes))

    def encode_bytes(self, grid: Grid) -> int:
        count = grid.patches + self.class_tokens.shape[0]
        tables = grid.patches * (_CHANNELS * _PATCH * _PATCH + 4 * 4)
        return tables + self.blocks[0].peak_bytes(count, self.projector_norm.weight.itemsize, self.piece_bytes)


def _check_form(config: Config, part: Config) -> None:
    """Raises UnknownError for a form of RADIO that no released model has."""
    version = str(part.get("version") or "").strip()
    if version not in _VERSIONS:
        raise UnknownError(f"config.json: unsupported RADIO version {version!r}")
    for place in (part, config):
        if (patch := size(place, "patch_size", _PATCH)) != _PATCH:
            raise UnknownError(f"config.json: unsupported RADIO patch_size {patch}, want {_PATCH}")
    ratio = config.get("downsample_ratio") or 1 / _MERGE
    if not isinstance(ratio, int | float) or not 1 / (_MERGE + 0.5) <= ratio <= 1 / (_MERGE - 0.5):
        raise UnknownError(f"config.json: unsupported downsample_ratio {ratio!r}, want {1 / _MERGE}")


def _triplet(config: Config, key: str) -> tuple[float, ...]:
    """Returns a field of config.json: one number for each channel. Raises ModelError for other values."""
    found = config.get(key) or list(_CLIP[key])
    if not isinstance(found, list) or len(found) != _CHANNELS or not all(type(each) in (int, float) for each in found):
        raise ModelError(f"config.json: {key} must contain {_CHANNELS} numbers, found {found!r}")
    if key == "norm_std" and 0 in found:
        raise ModelError(f"config.json: {key} must not contain 0, found {found!r}")
    return tuple(map(float, found))
