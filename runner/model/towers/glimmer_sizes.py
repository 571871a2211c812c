"""Reads the sizes of Glimmer's tower, from `config.json` in the form of transformers or in Meta's own."""

from collections.abc import Mapping
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.towers.choices import few, only, real, rope_theta, words
from runner.model.towers.fields import head_width, part_of, size, text_width
from runner.model.towers.tower import Grid

WINDOW, FULL = "window_attention", "full_attention"
_THETA = 10_000.0


class Sizes(NamedTuple):
    """The numbers of a tower. `interleaved`: the two of a rotary pair lie beside each other, not half a head apart."""

    hidden: int
    inner: int
    heads: int
    patch: int
    copies: int
    merge: int
    table: Grid
    kinds: tuple[str, ...]
    output: int
    adapter: int
    width: int
    theta: float
    eps: float
    interleaved: bool


def read_sizes(config: Mapping[str, object]) -> Sizes:
    """Returns the sizes of the tower that a whole `config.json` describes. Raises ModelError for nonsense."""
    sizes = _published(config) if "text_config" in config else _original(config)
    head_width(sizes.hidden, sizes.heads, 4)  # two directions, two halves each
    if sizes.output != sizes.hidden * sizes.merge**2:
        wanted = f"{sizes.hidden} * {sizes.merge}^2"
        raise ModelError(f"config.json: a vision tower's output must be {wanted} wide, found {sizes.output}")
    return sizes


def _published(config: Mapping[str, object]) -> Sizes:
    """Reads the form of transformers. Defaults are those of its class."""
    vision = part_of(config)
    only(vision, "hidden_act", "gelu")
    only(config, "projector_hidden_act", "gelu")
    hidden, merge = size(vision, "hidden_size", 1536), few(vision, "merge_size", 2)
    return Sizes(
        hidden=hidden,
        inner=size(vision, "intermediate_size", 8960),
        heads=size(vision, "num_attention_heads", 16),
        patch=few(vision, "patch_size", 14),
        copies=few(vision, "patch_temporal", 2),
        merge=merge,
        table=Grid(few(vision, "pos_emb_height", 32), few(vision, "pos_emb_width", 32)),
        kinds=words(vision, "layer_types", (WINDOW, FULL), _kinds(few(vision, "num_hidden_layers", 50), 4)),
        output=size(config, "out_hidden_size", hidden * merge**2),
        adapter=size(config, "projector_hidden_size", 4096),
        width=text_width(config),
        theta=rope_theta(vision, _THETA),
        eps=real(vision, "layer_norm_eps", 1e-5),
        interleaved=False,
    )


def _original(config: Mapping[str, object]) -> Sizes:
    """Reads Meta's own form: one object, rotary pairs beside each other, kinds of layers by a period."""
    hidden = size(config, "vision_latent_dim")
    return Sizes(
        hidden=hidden,
        inner=int(real(config, "vision_mlp_ratio") * hidden),
        heads=size(config, "vision_heads"),
        patch=few(config, "vision_patch_size"),
        copies=few(config, "vision_patch_temporal"),
        merge=few(config, "vision_downsample_factor"),
        table=Grid(few(config, "vision_pos_emb_grid_h"), few(config, "vision_pos_emb_grid_w")),
        kinds=_kinds(few(config, "vision_layers"), size(config, "vision_sparse_attention_factor", 1)),
        output=size(config, "vision_output_dim"),
        adapter=size(config, "vision_adapter_dim"),
        width=text_width(config),
        theta=_THETA,
        eps=1e-5,
        interleaved=True,
    )


def _kinds(layers: int, period: int) -> tuple[str, ...]:
    """Full attention in every layer whose number is a multiple of `period`, and in the last."""
    return tuple(FULL if number % period == 0 or number == layers else WINDOW for number in range(1, layers + 1))
