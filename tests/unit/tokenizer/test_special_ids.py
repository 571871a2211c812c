"""BOS and EOS: the first file that names one wins (docs/internals/wire.md, 2.8)."""

import json

import pytest

from runner.errors import ModelError
from runner.tokenizer.special_ids import SpecialIds, resolve_special_ids

ADDED = {"<s>": 1, "</s>": 2, "<|end|>": 7}


def resolve(generation: object = None, config: object = None, tokenizer: object = None) -> SpecialIds:
    given = {"generation_config.json": generation, "config.json": config, "tokenizer_config.json": tokenizer}
    files = {name: json.dumps(value).encode() for name, value in given.items() if value is not None}
    return resolve_special_ids(files.get, ADDED)


def test_generation_config_wins_and_nothing_is_merged() -> None:
    ids = resolve({"eos_token_id": [5, 6], "bos_token_id": 4}, {"eos_token_id": 8, "bos_token_id": 9})
    assert ids == SpecialIds(bos=4, eos=frozenset({5, 6}), add_bos=False, end=5)


def test_bos_and_eos_come_from_different_files() -> None:
    ids = resolve({"eos_token_id": 5}, {"bos_token_id": 9}, {"bos_token": "<s>", "eos_token": "</s>"})
    assert ids == SpecialIds(bos=9, eos=frozenset({5}), add_bos=False, end=5)


@pytest.mark.parametrize("nothing", [None, [], "2", [-1], True, {"id": 2}, float("nan")])
def test_what_is_no_id_is_passed_over(nothing: object) -> None:
    ids = resolve({"eos_token_id": nothing, "bos_token_id": nothing}, {"eos_token_id": 8, "bos_token_id": [9, 3]})
    assert ids == SpecialIds(bos=9, eos=frozenset({8}), add_bos=False, end=8)


def test_the_nested_text_config_is_not_asked() -> None:
    assert resolve(config={"text_config": {"eos_token_id": 8}}, tokenizer={"eos_token": "</s>"}).eos == {2}


def test_token_texts_are_strings_or_objects_and_must_be_added_tokens() -> None:
    assert resolve(tokenizer={"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}) == SpecialIds(
        bos=1, eos=frozenset({7}), add_bos=False, end=7
    )
    assert resolve(tokenizer={"bos_token": "hello", "eos_token": None}) == SpecialIds(None, frozenset(), False)


@pytest.mark.parametrize(
    ("config", "add_bos"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, True),
        ({"bos_token": "<s>"}, False),
        ({"add_bos_token": "true", "bos_token": "<s>"}, False),
        ({"add_bos_token": True}, False),
    ],
)
def test_bos_is_added_only_where_the_config_says_so_and_it_is_known(config: object, add_bos: bool) -> None:
    assert resolve(tokenizer=config).add_bos is add_bos


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data", [b"{", b"[1]"])
def test_a_broken_file_is_named(name: str, data: bytes) -> None:
    with pytest.raises(ModelError, match=rf"^parse tokenizer: {name}: "):
        resolve_special_ids({name: data}.get, ADDED)


def merged(**files: object) -> SpecialIds:
    given = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return resolve_special_ids(given.get, ADDED, own={"bos_token": "<s>", "eos_token": "</s>"}, merge_eos=True)


def test_the_special_tokens_map_of_a_directory_counts_unless_there_is_a_table() -> None:
    token_map = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|end|>"}
    assert merged(special_tokens_map=token_map) == SpecialIds(7, frozenset({7}), False, 7)
    assert merged(special_tokens_map=token_map, tokenizer_config={"eos_token": "</s>"}).eos == {7}
    newer = {"eos_token": "</s>", "added_tokens_decoder": {}}
    assert merged(special_tokens_map=token_map, tokenizer_config=newer).eos == {2}
    assert merged(special_tokens_map=token_map, tokenizer_config={"added_tokens_decoder": {}}).eos == {7}
    assert merged(special_tokens_map=token_map, config={"eos_token_id": 5}).eos == {5, 7}


def test_a_directory_reads_the_nested_text_config_if_no_file_has_ids() -> None:
    assert merged(config={"text_config": {"eos_token_id": [8, 9]}}).eos == {2, 8, 9}
    assert merged(config={"eos_token_id": 5, "text_config": {"eos_token_id": 8}}).eos == {2, 5}
    assert merged(config={"text_config": 3}).eos == {2}


def test_a_store_has_ollamas_rule_and_reads_other_files_only_if_it_finds_none() -> None:
    files = {"special_tokens_map.json": b'{"eos_token": "<|end|>"}', "config.json": b'{"eos_token_id": 5}'}
    assert resolve_special_ids(files.get, ADDED).eos == {5}
    files["tokenizer_config.json"] = b'{"eos_token": "</s>"}'
    files["config.json"] = b'{"text_config": {"eos_token_id": 8}}'
    assert resolve_special_ids(files.get, ADDED).eos == {2}
    del files["tokenizer_config.json"]
    assert resolve_special_ids(files.get, ADDED).eos == {7}
    del files["special_tokens_map.json"]
    assert resolve_special_ids(files.get, ADDED).eos == {8}
    del files["config.json"]
    assert resolve_special_ids(files.get, ADDED).eos == frozenset()
    assert resolve(config={"eos_token_id": 5}, tokenizer={"eos_token": "</s>"}).eos == {5}
