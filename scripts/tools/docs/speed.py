"""The speed of architectures, as documents tell it: measured families, and all others by the layers that they share.

`speed.toml` has the figures of `scripts/bench families`, `cache.toml` those of `scripts/bench trace`.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d
from mlx.utils import tree_flatten

from scripts.tools.models.architectures import config, module_of

# isort: split
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

_OTHER = frozenset({"bailing_hybrid", "bailing_moe_linear", "recurrent_gemma", "rwkv7"})  # no layer class tells them
OTHER, DELTA, MAMBA_2, MAMBA_1, LATENT, SHORT, EXPERTS, ATTENTION = KINDS = (
    "Other recurrences",
    "Gated delta nets",
    "Mamba 2",
    "Mamba 1",
    "Latent attention",
    "Short convolutions",
    "Experts",
    "Attention and dense layers",
)
"""In the order in which an architecture with several is listed."""
_Row = Sequence[float]


@cache
def _measured() -> Mapping[str, _Row]:
    return cast("dict[str, _Row]", tomllib.loads(Path(__file__).with_name("speed.toml").read_text()))


def kind_of(name: str) -> str:
    """Returns the first of KINDS of which an architecture has layers. Builds it, and computes nothing."""
    module = module_of(name)
    model = module.Model(module.ModelArgs.from_dict(config(name)))
    classes = {type(each) for _, each in model.named_modules()}
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    own = {path.rpartition(".")[2]: array for path, array in arrays}
    if name in _OTHER:
        return OTHER
    if "A_log" in own:
        return DELTA if "D" not in own else MAMBA_2 if own["A_log"].ndim == 1 else MAMBA_1
    for kind, layer in ((LATENT, MultiLinear), (SHORT, Conv1d), (EXPERTS, SwitchLinear)):
        if layer in classes:
            return kind
    return ATTENTION


def known(names: Iterable[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each kind with the measured architectures of it, with their ratios, and the names of the others."""
    of_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in names:
        of_kind[kind_of(name)].append(name)
    figures = {name: ", ".join(f"{ratio:.1f}" for ratio in row[2:5]) for name, row in _measured().items()}
    for kind, each in of_kind.items():
        found = [f"`{name}` ({figures[name]})" for name in each if name in figures]
        yield kind, found, [name for name in each if name not in figures]


def families_table() -> str:
    """Returns the measured families as a Markdown table."""
    rows = [
        "| module | layers | active parameters | prompt | one turn more | one answer "
        "| prompt, beside llama.cpp | one answer, beside llama.cpp |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (total, active, *ratios) in _measured().items():
        size = f"{active:.0f} M" + (f" of {total:.0f} M" if total > active else "")
        cells = (f"`{name}`", kind_of(name), size, *(f"{ratio:.2f}" for ratio in ratios))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def cache_table() -> str:
    """Returns the tokens that caches compute beyond the least as a Markdown table, in thousands."""
    rows = tomllib.loads(Path(__file__).with_name("cache.toml").read_text())
    names = ("layers, memory limit", *rows.pop("columns"))
    cells = [(name, *(f"{tokens:,}" for tokens in found)) for name, found in rows.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in (names, ["---"] * len(names), *cells))
