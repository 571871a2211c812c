"""The encoder of EmbeddingGemma 2: the numbers of mlx-vlm, alone, padded beside others, and in blocks."""

import re
from collections.abc import Mapping, Sequence
from math import hypot, nan
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from runner.commands.check.inspection import Inspection, inspect
from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights.loading import load
from runner.settings import CheckSettings
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.sources import published, write_source
from scripts.tools.models.sources_form import ENCODERS
from scripts.tools.models.sources_steps import Step, renamed
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from tests.model.embeddings.record import ENCODER, LENGTHS, RECORDED, tokens

TOGETHER = (1, 40, 9, 33, 20, 2)
"""Lengths of texts: less than a window, about one, and several."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return encoder(write_source(tmp_path_factory.mktemp("published"), ENCODER))


def encoder(directory: Path) -> Any:
    return load(open_model(str(directory), directory)).module


def alone(model: Any, length: int, start: int = 0) -> mx.array:
    return cast("mx.array", model(mx.array([tokens(length, start)]))[0])


def together(model: Any, lengths: Sequence[int]) -> mx.array:
    rows = [tokens(length, number) + [3] * (max(lengths) - length) for number, length in enumerate(lengths)]
    return cast("mx.array", model.finished(model.encode(mx.array(rows), lengths)))


def apart(one: mx.array, other: mx.array) -> float:
    """What their cosine lacks of 1."""
    a, b = cast("list[float]", one.tolist()), cast("list[float]", other.tolist())
    return 1 - sum(x * y for x, y in zip(a, b, strict=True)) / hypot(*a) / hypot(*b)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_embedding_is_mlx_vlms(model: Any, length: int) -> None:
    wanted = cast("dict[str, mx.array]", mx.load(str(RECORDED)))[str(length)]
    found = alone(model, length)
    assert found.dtype == mx.float32
    assert abs(sum(each * each for each in cast("list[float]", found.tolist())) - 1) < 1e-5
    assert apart(found, wanted) < 1e-9
    assert apart(alone(model, length, start=1), wanted) > 1e-4


def test_texts_in_one_forward_are_as_each_by_itself(model: Any) -> None:
    found = together(model, TOGETHER)
    for number, length in enumerate(TOGETHER):
        assert apart(found[number], alone(model, length, number)) < 1e-9


def test_blocks_of_queries_make_no_difference(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to a long text nor to several, and they are as small as they have to be."""
    wanted, row = together(model, TOGETHER), alone(model, 300)
    module = __import__(type(model).__module__, fromlist=["_SCORES"])
    monkeypatch.setattr(module, "_SCORES", 7 * len(TOGETHER) * max(TOGETHER))
    found = together(model, TOGETHER)
    assert max(map(apart, found, wanted)) < 1e-9
    assert apart(alone(model, 300), row) < 1e-9
    rows = mx.array([tokens(40)] * len(TOGETHER))
    pieces = [piece.arrays for piece in model.encode(rows, [40] * len(TOGETHER))]
    assert {arrays[-1].shape[1] for arrays in pieces[:-1]} == {7, 5}
    assert len(pieces) == len(model.layers) * 6 + 1


def test_the_work_of_a_piece_grows_with_its_rows_and_with_the_keys_that_it_sees(model: Any) -> None:
    def work(rows: int, length: int) -> list[float]:
        return [piece.token_layers for piece in model.encode(mx.zeros((rows, length), mx.int32), [length] * rows)]

    layers = len(model.layers)
    assert len(work(1, 10)) == layers + 1
    assert work(1, 10)[-1] == 0
    assert work(2, 10) == [2 * each for each in work(1, 10)]
    near, everything = work(1, 1000)[0], work(1, 1000)[layers - 1]
    assert 1000 < near < everything


OLDER: Step = renamed(
    (r"model\.language_model\.embedding_projection", "model.embedding_projection"),
    (r"model\.language_model\.ple\.", "language_model."),
    (r"model\.language_model\.(layers\.\d+\.)ple_block\.", r"language_model.\1"),
    (r"model\.language_model\.", "language_model."),
)
"""Names of first releases."""


@pytest.mark.parametrize("step", [renamed(), OLDER, renamed((r"model\.language_model\.", ""))])
@pytest.mark.parametrize("stored", [True, False])
def test_all_names_are_known(model: Any, step: Step, stored: bool, tmp_path: Path) -> None:
    source = ENCODERS[ENCODER]
    directory = write_directory(tmp_path / "d", source.config, step(published(source, "float32")))
    write_store(tmp_path, "m", directory)
    opened = open_model("m" if stored else str(directory), tmp_path)
    assert (opened.context_length, opened.vocab_size) == (8192, 274)
    assert mx.array_equal(alone(load(opened).module, 20), alone(model, 20))


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_a_packed_store_is_near_it(model: Any, kind: Quantization, tmp_path: Path) -> None:
    """Towers are not read, the rows of the inputs of all layers are cut as they are packed."""
    directory = write_source(tmp_path / "d", f"{ENCODER}-towers")
    store = write_store(tmp_path, "m", directory, kind)
    assert "model.language_model.ple.per_layer_model_projection.weight.scale" in store.tensors(
        "model.language_model.ple.per_layer_model_projection.weight"
    )
    opened = open_model("m", tmp_path)
    packed = load(opened, "float32").module
    assert 0 < apart(alone(packed, 20), alone(model, 20)) < 0.2
    assert apart(together(packed, TOGETHER)[4], alone(packed, 20, 4)) < 1e-6
    assert not [name for name in opened.tensors if "tower" in name]


@pytest.mark.parametrize(
    ("fields", "without", "text"),
    [
        ({"vocab_size_per_layer_input": 9}, "-", "(token-identity PLE) is not implemented; got 9"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "-",
            'unsupported rope_type "yarn" for full_attention',
        ),
        ({"layer_types": ["full_attention"]}, "-", "layer_types must be 6 of"),
        ({}, "embedding_projection", "lacks 1 tensor"),
        ({}, "layers.3.layer_scalar", "layers.3.layer_scalar"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    fields: Mapping[str, object], without: str, text: str, tmp_path: Path
) -> None:
    source = ENCODERS[ENCODER]
    text_config = {**cast("dict[str, object]", source.config["text_config"]), **fields}
    weights = {name: array for name, array in published(source, "float32").items() if without not in name}
    directory = write_directory(tmp_path / "d", {**source.config, "text_config": text_config}, weights)
    with pytest.raises(ModelError, match=re.escape(text)):
        load(open_model(str(directory), tmp_path))


def report(directory: Path, *, verify: bool = True) -> Inspection:
    return inspect(CheckSettings(model=str(directory), models_dir=directory, verify=verify, log_level=0))


def test_check_names_a_tensor_that_holds_no_numbers(tmp_path: Path) -> None:
    source = ENCODERS[ENCODER]
    weights = published(source, "float32")
    name = next(name for name in weights if "q_proj" in name)
    weights[name][0, 0] = nan
    directory = write_directory(tmp_path / "d", source.config, weights)
    assert [name.endswith(problem.split()[1].rstrip(":")) for problem in report(directory).problems] == [True]


def test_check_tries_texts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--verify`, and tells what is wrong."""
    directory = write_source(tmp_path / "d", ENCODER)
    said = "768 numbers a text, or the first of them (128, 256, 512, 768); no completions"
    for verify, more in ((False, ""), (True, "; together here: right")):
        found = report(directory, verify=verify).embeddings
        assert found is not None
        assert (found.text, found.is_fault) == (said + more, False)
    layer = __import__("mlx_lm.models.embedding_gemma2", fromlist=["EncoderLayer"]).EncoderLayer
    monkeypatch.setattr(layer, "_mask", lambda *_: None)
    wrong = report(directory)
    assert wrong.trial is None
    assert wrong.embeddings is not None
    assert wrong.embeddings.is_fault
    assert "together here: a text of 3 tokens has a cosine of" in wrong.embeddings.text
