"""The same file, prepared in another way, is another picture: to the digest, to the names, and to the caches."""

from collections.abc import Sequence
from itertools import combinations
from typing import cast

import pytest

from protocol import Media
from runner.engine.pictures.expand import expand
from runner.engine.pictures.support import PictureSupport
from runner.media.families.family import Family
from runner.media.families.gemma4 import BUDGETS, Gemma4
from runner.media.families.gemma4_unified import Gemma4Unified
from runner.media.families.glimmer import Glimmer
from runner.media.families.nemotron_h import NemotronH
from runner.media.families.qwen3_5 import Qwen35
from runner.media.pixels import PixelStore
from runner.media.prompt import Picture, PictureNames
from runner.tokenizer import Tokenizer
from tests.unit.media.pictures import Here, encoded, smooth

FILE = encoded(smooth(900, 600))
START, SOFT, END = 1, 2, 3


class NoText:
    """A tokenizer of prompts that have no text."""

    def encode(self, text: str) -> list[int]:
        assert not text
        return []

    encode_without_bos = encode


class Later(Qwen35):
    """Prepares pictures otherwise, into as many rows and tokens."""

    version = Qwen35.version + 1


PREPARATIONS: dict[str, Sequence[Family]] = {
    "budgets of Gemma 4": [Gemma4(budgets=(budget,)) for budget in BUDGETS],
    "bounds of Qwen": [Qwen35(), Qwen35(max_pixels=200_000), Qwen35(min_pixels=700_000), Later()],
    "bounds of Nemotron": [NemotronH(), NemotronH(max_patches=1024), NemotronH(min_patches=4000)],
    "bounds of Glimmer": [Glimmer(), Glimmer(max_tokens=100), Glimmer(patch=16)],
    "a tower or none": [Gemma4(), Gemma4Unified()],
    "families": [Qwen35(), Glimmer(), Gemma4(), Gemma4Unified(), NemotronH()],
}


def shown(family: Family, names: PictureNames) -> Picture:
    """The file as a model of this family shows it, beside models that share its names."""
    support = PictureSupport(family, START, SOFT, END, names, PixelStore(family))
    found = expand("[img-0]", [Media(data=FILE, id=0, kind="image")], support, cast("Tokenizer", NoText()), 100_000)
    (span,) = found.spans
    assert found.keys == [START, *[span.picture.name] * span.picture.geometry.tokens, END]
    return span.picture


@pytest.mark.parametrize("name", PREPARATIONS)
def test_every_preparation_of_a_file_has_a_name_of_its_own(name: str) -> None:
    names = PictureNames()
    pictures = [shown(family, names) for family in PREPARATIONS[name]]
    for one, other in combinations(pictures, 2):
        assert one.name != other.name, (one.geometry, other.geometry)
    again = [shown(family, names) for family in PREPARATIONS[name]]
    assert [picture.name for picture in again] == [picture.name for picture in pictures]


def test_equal_preparations_share_a_name_whoever_made_them() -> None:
    names = PictureNames()
    assert shown(Gemma4(), names).name == shown(Gemma4(budgets=(280,)), names).name
    assert shown(Qwen35(), names).name == shown(Qwen35(min_pixels=70_000), names).name, "it is larger than that"


def test_pixels_of_one_budget_are_not_those_of_another() -> None:
    """One store, which looks for pictures by their names."""
    names, small, large = PictureNames(), Gemma4(budgets=(70,)), Gemma4(budgets=(280,))
    store = PixelStore(large, decoder=Here())
    store.check(shown(small, names), bool).result()
    assert not store.is_sound(shown(large, names))
    assert (
        len(store.rows(shown(large, names), bool).result())
        == shown(large, names).geometry.rows * shown(large, names).geometry.columns
    )
