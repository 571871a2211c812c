"""Tokens that only the files beside a `tokenizer.json` add, compared with transformers: ids, flags, roles, the end."""

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, sentencepiece, trained_model

Json = dict[str, object]
FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
PIECES = [" ", "h", "e", "l", "o", " h", "<p>", "</p>"]
TEXTS = (
    *("<a>hello<b>", "  <a>  hello <b> \n", "x<a>x", "<a> <a>", "hell <q>o", "<A> <B>", "<p>hello</p>", "<img><c>"),
    *("", "<a", "é<a>é", "hello <e>", "1<b>2 <b> 3"),
)


def entry(content: str, *flags: str) -> Json:
    """Returns an entry of a table of added tokens with these flags."""
    return {"content": content, **{flag: flag in flags for flag in FLAGS}}


def table(*entries: Json, start: int = 256) -> Json:
    return {"added_tokens_decoder": {str(start + at): each for at, each in enumerate(entries)}}


def typed(content: str, *flags: str) -> Json:
    return {"__type": "AddedToken", **entry(content, *flags)}


BYTES = byte_level([*ALL_BYTES])
LOWER = {**BYTES, "normalizer": {"type": "Lowercase"}}
PIECED = sentencepiece(PIECES)
SIZE = 4 + 256 + len(PIECES)
KNOWN = byte_level([*ALL_BYTES], ["<a>"])
CONFIG, MAP, ADDED = "tokenizer_config", "special_tokens_map", "added_tokens"

FORMS: dict[str, dict[str, Json]] = {
    "a table": {"tokenizer": BYTES, CONFIG: table(entry("<a>", "special"), entry("<b>"))},
    **{
        f"a table with {flag}": {"tokenizer": LOWER, CONFIG: table(entry("<a>", "special", flag), entry("<b>", flag))}
        for flag in FLAGS
    },
    "a table with all flags": {"tokenizer": BYTES, CONFIG: table(entry("<a>", *FLAGS), entry("<b>", *FLAGS[1:]))},
    "a table of pieces": {
        "tokenizer": PIECED,
        CONFIG: table(entry("<p>", "special"), entry("</p>"), entry("<a>"), start=SIZE - 2),
    },
    "a table with other flags": {"tokenizer": KNOWN, CONFIG: table(entry("<a>", "special", "lstrip"), entry("<b>"))},
    "a table with more": {"tokenizer": KNOWN, CONFIG: table(entry("<a>", "special"), entry("<b>", "special"))},
    "an older file": {"tokenizer": BYTES, ADDED: {"<a>": 256, "<b>": 257}},
    "an older file, lower case": {"tokenizer": LOWER, ADDED: {"<a>": 256, "<b>": 257}},
    "an older file and names": {
        "tokenizer": LOWER,
        ADDED: {"<a>": 256, "<b>": 257, "<q>": 258},
        MAP: {"eos_token": "<a>", "extra_special_tokens": ["<b>", "<c>"]},
    },
    "an older file beside tokens": {"tokenizer": KNOWN, ADDED: {"<a>": 256, "<b>": 257}},
    "a map": {"tokenizer": BYTES, MAP: {"eos_token": "<a>", "pad_token": "<b>", "extra_special_tokens": ["<c>"]}},
    "a map with flags": {"tokenizer": BYTES, MAP: {"eos_token": {"content": "<a>", "lstrip": True, "rstrip": False}}},
    "a map of pieces": {"tokenizer": PIECED, MAP: {"eos_token": "<p>", "additional_special_tokens": ["</p>"]}},
    "a map over a config": {"tokenizer": BYTES, CONFIG: {"eos_token": "<b>"}, MAP: {"eos_token": "<a>"}},
    "a map beside a table": {
        "tokenizer": BYTES,
        CONFIG: {**table(entry("<a>", "special")), "eos_token": "<a>"},
        MAP: {"eos_token": "<b>", "additional_special_tokens": ["<c>"]},
    },
    "names": {
        "tokenizer": BYTES,
        CONFIG: {"eos_token": "<e>", "unk_token": None, "additional_special_tokens": ["<a>"]},
    },
    "names with flags": {
        "tokenizer": BYTES,
        CONFIG: {
            "eos_token": typed("<a>", "rstrip"),
            "additional_special_tokens": [typed("<b>", "lstrip", "special"), "<c>"],
        },
    },
    "names of transformers 5": {
        "tokenizer": BYTES,
        CONFIG: {"extra_special_tokens": ["<a>", "<b>"], "eos_token": "<b>"},
    },
    "names by purpose": {
        "tokenizer": BYTES,
        CONFIG: {"extra_special_tokens": {"image_token": "<img>"}, "think_token": "<b>", "eos_token": "<a>"},
    },
    "an end that is a piece": {"tokenizer": BYTES, CONFIG: {"eos_token": "x"}},
    "a name in a table": {
        "tokenizer": BYTES,
        CONFIG: {**table(entry("<a>"), entry("<b>", "special")), "eos_token": "<a>", "pad_token": "<q>"},
    },
}


def write(directory: Path, files: Mapping[str, object]) -> None:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


def ours(files: Mapping[str, object], *, directory: bool = True) -> Tokenizer:
    data = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return open_tokenizer(data.get, merge_eos=directory)


def check_beside_transformers(directory: Path, files: Mapping[str, Json]) -> None:
    from transformers import PreTrainedTokenizerFast

    write(directory, files)
    theirs, tokenizer = PreTrainedTokenizerFast.from_pretrained(directory), ours(files)
    entries = theirs.added_tokens_decoder
    assert tokenizer.added == entries.keys()
    assert {tokenizer.token_text(number): number for number in entries} == theirs.added_tokens_encoder
    assert tokenizer.special == {*theirs.all_special_ids, *(i for i, each in entries.items() if each.special)}
    if theirs.eos_token_id is not None or "added_tokens_decoder" not in files.get(CONFIG, {}):
        assert tokenizer.eos == {number for number in [theirs.eos_token_id] if number is not None}
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", FORMS)
def test_the_tokens_of_a_directory_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_beside_transformers(tmp_path, FORMS[name])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_any_mix_of_files_is_read_as_by_transformers(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    made, first, known = draw.choice([(BYTES, 256, []), (LOWER, 256, []), (PIECED, SIZE, []), (KNOWN, 256, ["<a>"])])
    texts = draw.sample(["<a>", "<b>", "<c>", "<q>", "<img>"], 5)
    named = [*texts, "<p>", "</p>"]
    table_too = draw.random() < 0.5

    def flags() -> list[str]:
        return ["special", *(flag for flag in FLAGS[1:] if draw.random() < 0.3)]

    def maybe() -> bool:
        return draw.random() < 0.4

    def token() -> object:
        text = draw.choice(named)
        return draw.choice([text, typed(text, *flags())]) if table_too else text  # older releases wrote texts

    listed = [*known, *(text for text in texts[: draw.randint(0, 3)] if text not in known)]
    entries = [entry(text, *flags()[draw.randint(0, 1) :]) for text in listed]
    roles = {role: token() for role in ("eos_token", "pad_token", "bos_token", "image_token") if maybe()}
    others = {"extra_special_tokens": draw.sample(named, 2)} if maybe() else {}
    files: dict[str, Json] = {
        CONFIG: {**(table(*entries, start=first) if table_too else {}), **roles, **others},
        MAP: {role: draw.choice(named) for role in ("eos_token", "pad_token", "unk_token") if maybe()},
        ADDED: {text: first + at for at, text in enumerate(listed) if text not in known},
    }
    kept = {name: each for name, each in files.items() if maybe()}
    check_beside_transformers(tmp_path, {"tokenizer": made, **kept})


def test_older_names_are_special_in_older_files_which_transformers_5_overlooks() -> None:
    files = {"tokenizer": LOWER, ADDED: {"<a>": 256, "<b>": 257}, MAP: {"additional_special_tokens": ["<b>"]}}
    tokenizer = ours(files)
    assert tokenizer.added == {256, 257}
    assert tokenizer.special == {257}
    assert tokenizer.encode("<A><B>")[0] == 256  # searched for after normalization, as ordinary tokens are
    assert 257 not in tokenizer.encode("<A><B>")


@pytest.mark.parametrize("flag", FLAGS[1:4])
def test_flags_count_beside_a_tokenizer_model_too(flag: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model = trained_model("bpe", dummy_prefix=False)
    size = open_tokenizer({"tokenizer.model": model}.get).vocab_size
    config = table(entry("<a>", "special", flag), entry("<b>", flag), start=size)
    (tmp_path / "tokenizer.model").write_bytes(model)
    write(tmp_path, {CONFIG: config})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    files = {"tokenizer.model": model, f"{CONFIG}.json": json.dumps(config).encode()}
    tokenizer = open_tokenizer(files.get, merge_eos=True)
    for text in (*TEXTS, "x<a><b>x", "a <a> <b> b"):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), text
    stored = open_tokenizer(files.get)
    assert stored.token_text(stored.encode("x <a> x")[-2]) == " "


# Ids


def test_ids_are_those_of_the_file_where_transformers_takes_the_next_free_ones() -> None:
    config = table(entry("<a>", "special"), start=300)
    tokenizer = ours({"tokenizer": BYTES, CONFIG: {**config, "eos_token": "<a>"}, ADDED: {"<b>": 298}})
    assert tokenizer.encode("<a>x<b>") == [300, ord("x"), 298]
    assert tokenizer.eos == {300}
    assert tokenizer.vocab_size == 301


def test_an_id_that_the_vocabulary_gives_to_another_token_stays_with_it() -> None:
    tokenizer = ours({"tokenizer": KNOWN, CONFIG: table(entry("<b>"), entry("<c>")), ADDED: {"<d>": 257}})
    assert tokenizer.encode("<a><c>") == [256, 257]
    assert tokenizer.encode("<b>") == [*b"<b>"]
    assert tokenizer.encode("<d>") == [*b"<d>"]


@pytest.mark.parametrize("config", [{"vocab_size": 257}, {"text_config": {"vocab_size": 257}, "vocab_size": 256}])
def test_a_special_token_without_an_id_stays_text_if_the_model_has_no_row_for_it(
    config: Json, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"eos_token": "<a>", "pad_token": "<b>"}
    with caplog.at_level(logging.WARNING):
        tokenizer = ours({"tokenizer": BYTES, CONFIG: names, "config": config})
    assert tokenizer.encode("<a><b>") == [256, *b"<b>"]
    assert tokenizer.eos == {256}
    assert [record.__dict__["attributes"]["token"] for record in caplog.records] == ["<b>"]


def test_an_eos_token_without_an_id_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    files = {"tokenizer": BYTES, CONFIG: {"eos_token": "<a>"}, "config": {"vocab_size": 256, "eos_token_id": 7}}
    assert ours(files).eos == {7}
    assert len(caplog.records) == 1


# Stores


def test_a_store_adds_the_tokens_of_the_files_and_matches_them_by_text_alone() -> None:
    config = table(entry("<a>", "special", "lstrip", "rstrip"), entry("<b>", "single_word", "normalized"))
    tokenizer = ours({"tokenizer": LOWER, CONFIG: {**config, "eos_token": "<a>"}}, directory=False)
    assert tokenizer.encode("x <a> x<b>x") == [ord("x"), 32, 256, 32, ord("x"), 257, ord("x")]
    assert tokenizer.encode("<B>") == [*b"<b>"]
    assert tokenizer.eos == tokenizer.special == {256}
