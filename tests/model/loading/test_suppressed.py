"""`suppress_tokens` of `generation_config.json`: Gemma 4 lists its image and audio tokens there."""

import json
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.weights.load import LoadedModel, load
from scripts.tools.models.checkpoints import VOCABULARY_SIZE, write_checkpoint
from tests.model.loading.conftest import TOKENS


def loaded(directory: Path, tokens: object) -> LoadedModel:
    write_checkpoint(directory, "gemma3_text")
    (directory / "generation_config.json").write_text(json.dumps({"suppress_tokens": tokens}))
    return load(open_model(str(directory), directory))


def scores(model: LoadedModel) -> mx.array:
    return model.logits(mx.array([TOKENS]), model.make_layers())


def argmax(logits: mx.array) -> int:
    return cast("int", mx.argmax(logits[0, -1]).item())


def test_they_are_never_chosen_and_the_others_score_as_before(tmp_path: Path) -> None:
    plain = scores(loaded(tmp_path / "plain", None))
    best = argmax(plain)
    found = scores(loaded(tmp_path / "suppressed", [best, 3]))
    closed = mx.isinf(found).all(axis=(0, 1))
    assert mx.array_equal(closed, (mx.arange(VOCABULARY_SIZE) == best) | (mx.arange(VOCABULARY_SIZE) == 3))
    assert mx.array_equal(mx.where(closed, 0, found), mx.where(closed, 0, plain))
    assert argmax(found) != best
    assert found.dtype == plain.dtype


@pytest.mark.parametrize("tokens", [[-1, VOCABULARY_SIZE, 2.5, "3", None], 7, {}, []])
def test_what_is_no_token_is_passed_over(tokens: object, tmp_path: Path) -> None:
    """One beyond the vocabulary would be written beyond the scores."""
    assert mx.isfinite(scores(loaded(tmp_path, tokens))).all()


def test_a_broken_file_is_the_tokenizers_to_tell(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text("{")
    assert open_model(str(tmp_path), tmp_path).suppressed_tokens == []
