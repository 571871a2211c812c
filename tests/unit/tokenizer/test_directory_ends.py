"""A directory has the end tokens of mlx-lm; a store has those of Ollama (test_special_ids.py)."""

import itertools
import json
from pathlib import Path

import pytest

from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import byte_level, trained_model

EOS, END, TURN = 256, 257, 258
GENERATION: tuple[object, ...] = (None, {}, {"eos_token_id": TURN}, {"eos_token_id": [EOS, TURN]})
CONFIG: tuple[object, ...] = ({}, {"eos_token_id": EOS})
TOKENIZER: tuple[object, ...] = (
    {},
    {"eos_token": "<end>"},
    {"eos_token": {"content": "<end>", "__type": "AddedToken"}},
)


def write(directory: Path, files: dict[str, object]) -> None:
    for name, value in files.items():
        if value is not None:
            (directory / f"{name}.json").write_text(json.dumps(value))


def ours(directory: Path) -> frozenset[int]:
    paths = {path.name: path.read_bytes() for path in directory.iterdir()}
    return open_tokenizer(paths.get, merge_eos=True).eos


def mlx_lms(directory: Path) -> set[int]:
    from mlx_lm.utils import load_config, load_tokenizer  # slow: it brings transformers

    eos = load_config(directory).get("eos_token_id")
    return set(load_tokenizer(directory, eos_token_ids=eos).eos_token_ids)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer"), list(itertools.product(GENERATION, CONFIG, TOKENIZER))[::5]
)
def test_the_ends_are_those_of_mlx_lm(tmp_path: Path, generation: object, config: object, tokenizer: object) -> None:
    files = {"tokenizer": byte_level(special_tokens=["<eos>", "<end>", "<turn>"]), "tokenizer_config": tokenizer}
    write(tmp_path, {**files, "config": config, "generation_config": generation})
    assert ours(tmp_path) == mlx_lms(tmp_path)


TABLE = {"added_tokens_decoder": {str(END): {"content": "<end>", "special": True, "normalized": False}}}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<turn>"}, "special_tokens_map": {"eos_token": "<end>"}},
        {"tokenizer_config": {"eos_token": "<end>", **TABLE}, "special_tokens_map": {"eos_token": "<turn>"}},
        {"tokenizer_config": {"eos_token": "<end>", **TABLE}, "config": {"eos_token_id": [EOS, TURN]}},
        {"added_tokens": {"<end>": END}, "special_tokens_map": {"eos_token": {"content": "<end>"}}},
        {"added_tokens": {"<end>": END}, "generation_config": {"eos_token_id": EOS}},
        {"tokenizer_config": {"eos_token": "<end>"}, "generation_config": {"eos_token_id": TURN}},
    ],
)
def test_end_tokens_from_the_files_beside_a_vocabulary_are_those_of_mlx_lm(
    tmp_path: Path, files: dict[str, object]
) -> None:
    write(tmp_path, {"tokenizer": byte_level(special_tokens=["<eos>"]), "config": {}, **files})
    assert ours(tmp_path) == mlx_lms(tmp_path)


@pytest.mark.parametrize("tokenizer", [{"eos_token": "<s>"}, {"tokenizer_class": "LlamaTokenizer"}])
def test_the_ends_of_a_sentencepiece_model_are_those_of_mlx_lm(tmp_path: Path, tokenizer: object) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained_model())
    write(tmp_path, {"tokenizer_config": tokenizer, "config": {"model_type": "llama", "eos_token_id": 7}})
    assert ours(tmp_path) == mlx_lms(tmp_path)
