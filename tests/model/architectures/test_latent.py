"""Latent attention is the same in both of its forms, for every architecture that has it."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401

import mlx_lm.models  # isort: skip

from runner.model import latent
from runner.model.weights import assembly
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import Tiny, words
from tests.lib.driver import largest
from tests.model.architectures.subject import Subject

_SOURCES = [path for folder in mlx_lm.models.__path__ for path in Path(folder).glob("*.py")]
LATENT = sorted(path.stem for path in _SOURCES if "self.unembed_out(" in path.read_text())
"""The modules that have a branch for each form."""
CUTS = (7, 1, 2, 3, 5, 8, 12)


@pytest.mark.parametrize(
    ("queries", "keys", "absorbed"),
    [
        (1, 1, True),
        (16, 16, True),
        (17, 17, False),
        (40, 60, True),
        (40, 50, False),
        (167, 8192, True),
        (168, 8192, False),
    ],
)
def test_the_form_of_fewer_multiplications_is_taken_and_one_form_for_few_tokens(
    queries: int, keys: int, absorbed: bool
) -> None:
    """With latents of 512 numbers, and keys and values of 128 each."""
    assert latent.is_absorbed(queries, keys, 512, 256) == absorbed


def logits_of(model: Tiny, cuts: Sequence[int], *, absorbed: bool) -> mx.array:
    """Returns the logits of two texts, read in parts of these lengths in one form."""
    texts = mx.array([words(sum(cuts), seed) for seed in (1, 2)])
    layers = model.make_layers()
    with patch.object(latent, "is_absorbed", lambda *_: absorbed):
        parts = mx.split(texts, [sum(cuts[:i]) for i in range(1, len(cuts))], axis=1)
        found = mx.concatenate([model.logits(part, layers) for part in parts], axis=1)
        mx.eval(found)
    return found


@pytest.mark.parametrize("name", LATENT)
def test_both_forms_compute_the_same(name: str) -> None:
    """In one forward over a text, and in forwards over its parts."""
    model = build(name)
    whole = logits_of(model, [sum(CUTS)], absorbed=False)
    expanded, absorbed = (logits_of(model, CUTS, absorbed=absorbed) for absorbed in (False, True))
    assert not mx.array_equal(expanded, absorbed), "each is taken"
    for each in (expanded, absorbed, logits_of(model, [sum(CUTS)], absorbed=True)):
        assert largest(each - whole) <= model.tolerance


def test_a_model_that_is_loaded_chooses(tmp_path: Path) -> None:
    opened = Subject("deepseek_v3", tmp_path).opened
    with patch.object(assembly, "replace_forwards") as replace:
        assembly.build_module(opened)
    replace.assert_called_once_with()
