"""Tiny models that see and hear, and prompts that show them pictures.

    model = seeing("qwen3.5-seeing")
    parts = [words(5), Shown(3, 4), words(6, 2)]  # a text, a picture of 3 x 4 soft tokens, a text
    ids, places = tokens_of(parts), walk(parts)

`walk` is the rule of positions, said as a loop over tokens.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.media.families import PictureFamily, SoundFamily
from runner.media.forward import MediaForward
from runner.media.towers import SoundTower, Tower, load_tower, plan_sound_tower, plan_tower
from runner.model import OpenedModel, open_model
from runner.model.weights.loading import LoadedModel, load
from runner.model.weights.parameters import replace_submodule
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.sources import write_source
from scripts.tools.models.sources_towers import HEARING, SEEING, SEEING_GEMMAS

NAMES = (*SEEING, *SEEING_GEMMAS)
MROPE = ("qwen3.5-seeing", "qwen3.5-moe-seeing", "qwen3-next-seeing")
"""Positions have three channels."""
BOTH_WAYS = ("gemma4-moe-seeing", "gemma4-unified-seeing", "gemma4-unified-hearing")
"""The tokens of a picture see each other."""
SOFT, START, END = 62, 60, 61
"""The tokens in the place of pictures and around them, in all of these models."""
HEARS = tuple(HEARING)
"""Models that hear, and see."""
SOUND, SOUND_START, SOUND_END = 63, 57, 59
"""The tokens in the place of sounds and around them."""
SECTIONS = (3, 3, 2)
"""Of the widened rope: eight frequencies."""


class Seeing(NamedTuple):
    """A model that was opened once, for tests that leave it as it is."""

    name: str
    opened: OpenedModel
    loaded: LoadedModel
    tower: Tower
    family: PictureFamily
    tokenizer: Tokenizer
    sound_tower: SoundTower | None
    sound_family: SoundFamily | None

    def forward(self) -> MediaForward:
        """Returns the forward over pictures of this family."""
        sections = SECTIONS if self.name in MROPE else ()
        both_ways = self.name in BOTH_WAYS
        return MediaForward(self.loaded.module, sections=sections, sees_both_ways=both_ways)


@cache
def seeing(name: str) -> Seeing:
    """Returns the model of this name, whose attention turns all of a head where positions have channels."""
    with TemporaryDirectory() as folder:
        opened = open_model(str(write_source(Path(folder) / name, name)), Path("unused"))
        loaded = load(opened)
        if name in MROPE:
            widen(loaded.module)
        plan = plan_tower(opened)
        assert plan is not None
        tower = load_tower(plan)
        family = plan.kind.family.from_config(opened.config, {})
        ears = heard = None
        if name in HEARS:
            heard_plan = plan_sound_tower(opened)
            assert heard_plan is not None
            ears, heard = load_tower(heard_plan), heard_plan.kind.family.from_config(opened.config)
        return Seeing(name, opened, loaded, tower, family, open_tokenizer(opened.file), ears, heard)


def fresh(name: str) -> Module:
    """Returns the text model of this name once more, for tests that take it apart."""
    with TemporaryDirectory() as folder:
        loaded = load(open_model(str(write_source(Path(folder) / name, name)), Path("unused")))
        if name in MROPE:
            widen(loaded.module)
    for each in loaded.module.modules():
        for child in each:
            vars(each).pop(child, None)  # whoever takes it apart does so in the dictionaries
    return loaded.module


def widen(module: Module) -> None:
    """Lets a rope turn 16 dimensions, where the tiny models have two frequencies, too few for three channels."""
    from mlx.nn.layers.positional_encoding import RoPE

    for _, each in cast("Sequence[tuple[str, Module]]", module.named_modules()):
        if "rope" in each:
            replace_submodule(each, "rope", RoPE(16, base=100.0))


class Shown(NamedTuple):
    """A picture, by its rows and columns of soft tokens; equal seeds look alike."""

    rows: int
    columns: int
    seed: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def features(self, width: int = 64) -> mx.array:
        """Returns what a tower would make of it [count, width]."""
        return mx.random.normal((self.tokens, width), key=mx.random.key(self.seed))


Parts = Sequence[Sequence[int] | Shown]


class Place(NamedTuple):
    """A picture in a prompt."""

    start: int
    stop: int
    shown: Shown


def words(count: int, seed: int = 1) -> list[int]:
    """Returns a text of ordinary tokens."""
    return random.Random(seed).choices(range(1, 60), k=count)


def tokens_of(parts: Parts) -> list[int]:
    """Returns the tokens of a prompt."""
    return [token for part in parts for token in ([SOFT] * part.tokens if isinstance(part, Shown) else part)]


def places_of(parts: Parts) -> list[Place]:
    """Returns the pictures of a prompt."""
    places, at = [], 0
    for part in parts:
        length = part.tokens if isinstance(part, Shown) else len(part)
        if isinstance(part, Shown):
            places.append(Place(at, at + length, part))
        at += length
    return places


def walk(parts: Parts, more: int = 0) -> list[tuple[int, int, int]]:
    """Returns time, row and column of every token, and of `more` behind them."""
    found, counter = [], 0
    for part in (*parts, [0] * more):
        if isinstance(part, Shown):
            columns = part.columns
            found += [(counter, counter + each // columns, counter + each % columns) for each in range(part.tokens)]
            counter += max(part.rows, part.columns)
        else:
            found += [(counter + each,) * 3 for each in range(len(part))]
            counter += len(part)
    return found


PROMPTS: Mapping[str, Parts] = {
    "one": [words(5), Shown(3, 4), words(6, 2)],
    "two": [words(3), Shown(2, 3, 1), words(2, 2), Shown(4, 2, 2), words(4, 3)],
    "twice": [words(4), Shown(2, 4), words(3, 2), Shown(2, 4), words(4, 3)],
    "at the start": [Shown(2, 5), words(6)],
    "at the end": [words(4), Shown(3, 3), words(1, 2)],
    "side by side": [words(2), Shown(2, 2, 1), Shown(1, 3, 2), words(5, 2)],
    "wider than the window": [words(20), Shown(5, 8), words(10, 2)],
    "behind a window": [words(50), Shown(3, 4), words(40, 2)],
}
