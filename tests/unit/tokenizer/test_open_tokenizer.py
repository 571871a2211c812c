"""The choice of the tokenizer's file, and the messages for unreadable files."""

import json
import logging

import pytest

from runner.errors import ModelError
from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import byte_level, trained_model


def test_a_tokenizer_json_comes_first() -> None:
    files = {"tokenizer.json": json.dumps(byte_level()).encode(), "tokenizer.model": trained_model()}
    assert open_tokenizer(files.get).file == "tokenizer.json"
    del files["tokenizer.json"]
    assert open_tokenizer(files.get).file == "tokenizer.model"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (trained_model().replace("日本語".encode(), b"\xff" * 9), "a piece is not UTF-8: "),
        (b"IQ== 0\nIg== 1\n", "a tiktoken file; transformers' Auto"),
        (b"aGVsbG8= 0\r\n", "a tiktoken file; transformers' Auto"),
    ],
)
def test_a_tokenizer_model_that_is_none_is_named(model: bytes, text: str) -> None:
    with pytest.raises(ModelError, match=rf"^parse tokenizer: tokenizer\.model: {text}"):
        open_tokenizer({"tokenizer.model": model}.get)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["vocab.json", "merges.txt"], "vocab.json and merges.txt"),
        (["spiece.model"], "spiece.model"),
        (["tekken.json"], "tekken.json"),
        (["vocab.json"], ""),
        ([], ""),
    ],
)
def test_a_directory_without_a_tokenizer_gets_advice_for_another_form(names: list[str], found: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_tokenizer(dict.fromkeys(names, b"").get, merge_eos=True)
    advice = "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a tokenizer.json"
    assert str(caught.value) == (
        "load tokenizer config: no tokenizer.json and no tokenizer.model in the directory"
        f"{f'; there is {found}: {advice}' if found else ''}"
    )


def test_a_store_without_a_tokenizer_json_names_it() -> None:
    with pytest.raises(ModelError, match=r'^load tokenizer config: config "tokenizer.json" not found in manifest$'):
        open_tokenizer(lambda _: None)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("special_tokens_map.json", b"version https://git-lfs", "Expecting value"),
        ("special_tokens_map.json", b"[]", "expected an object, found list"),
        ("added_tokens.json", b"7", "expected an object, found int"),
        ("added_tokens.json", b'{"<a>": -1}', "-1 is not a token id"),
    ],
)
def test_a_broken_file_that_the_models_own_program_never_reads_is_told_and_passed_over(
    name: str, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ollama reads neither; transformers does, unless there is a newer table."""
    files = {"tokenizer.json": json.dumps(byte_level()).encode(), name: data}
    with caplog.at_level(logging.WARNING):
        assert open_tokenizer(files.get).kind == "BPE"
    assert reason in str(caplog.records[-1].__dict__["attributes"]["reason"])
    with pytest.raises(ModelError, match=rf"^parse tokenizer: {name}: .*{reason}"):
        open_tokenizer(files.get, merge_eos=True)
    files["tokenizer_config.json"] = b'{"added_tokens_decoder": {}}'
    assert open_tokenizer(files.get, merge_eos=True).kind == "BPE"
    assert len(caplog.records) == 2
