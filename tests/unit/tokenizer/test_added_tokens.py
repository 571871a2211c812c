"""Tokens that the files beside a `tokenizer.model` add to its pieces."""

import json

import pytest

from runner.errors import ModelError
from runner.tokenizer.added_tokens import AddedToken, configured_tokens

PIECES = ["<unk>", "<s>", "</s>", "!"]


def configured(config: object = None, added: object = None, special_map: object = None) -> list[AddedToken]:
    given = {"tokenizer_config.json": config, "added_tokens.json": added, "special_tokens_map.json": special_map}
    files = {name: json.dumps(value).encode() for name, value in given.items() if value is not None}
    return configured_tokens(files.get, lambda text: PIECES.index(text) if text in PIECES else None, len(PIECES))


def entry(content: str, **flags: bool) -> dict[str, object]:
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **flags}


def test_the_decoder_table_has_ids_texts_and_what_is_special() -> None:
    decoder = {"4": entry("<a>", special=True), "9": entry("<b>", special=False), "0": entry("<unk>", special=True)}
    assert configured({"added_tokens_decoder": decoder}) == [
        AddedToken(4, "<a>", True),
        AddedToken(9, "<b>", False),
        AddedToken(0, "<unk>", True),
    ]


def test_the_decoder_table_beats_the_older_file_for_a_text_and_for_an_id() -> None:
    config = {"added_tokens_decoder": {"4": entry("<a>"), "5": entry("<b>")}}
    assert configured(config, {"<a>": 7, "<c>": 5, "<d>": 6}) == [
        AddedToken(4, "<a>", False),
        AddedToken(5, "<b>", False),
        AddedToken(6, "<d>", False, normalized=True),
    ]


@pytest.mark.parametrize("place", ["config", "special_map"])
@pytest.mark.parametrize(
    "named",
    [
        {"additional_special_tokens": ["<a>"]},
        {"additional_special_tokens": [entry("<a>")]},
        {"extra_special_tokens": ["<a>"]},
        {"extra_special_tokens": {"image_token": "<a>"}},
        {"eos_token": "<a>"},
        {"pad_token": {"__type": "AddedToken", **entry("<a>")}},
    ],
)
def test_a_token_that_is_named_as_special_is_special(place: str, named: dict[str, object]) -> None:
    tokens = configured(named, {"<a>": 7}) if place == "config" else configured(None, {"<a>": 7}, named)
    assert tokens == [AddedToken(7, "<a>", True)]


def test_a_special_token_without_an_id_has_that_of_its_piece_or_the_next_free_one() -> None:
    """As in transformers, tokens with a role come first."""
    config = {"additional_special_tokens": ["<x>", "</s>", "<y>"], "pad_token": "<pad>", "eos_token": "</s>"}
    assert configured(config, {"<a>": 6}) == [
        AddedToken(6, "<a>", False, normalized=True),
        AddedToken(2, "</s>", True),
        AddedToken(7, "<pad>", True),
        AddedToken(8, "<x>", True),
        AddedToken(9, "<y>", True),
    ]
    assert configured(special_map={"additional_special_tokens": ["<x>"]}) == [AddedToken(4, "<x>", True)]


def test_a_character_with_which_a_model_pads_stays_text() -> None:
    """As a special token it could not be written where a format asks for it."""
    assert configured({"pad_token": "!", "eos_token": "</s>"}) == [AddedToken(2, "</s>", True)]


@pytest.mark.parametrize("nothing", [None, "", {}, 3, {"content": ""}, "<\ud800>", {"content": "\udfff"}])
def test_what_names_no_token_is_passed_over(nothing: object) -> None:
    """Half a character is no text that a library in Rust could take."""
    config = {"pad_token": nothing, "additional_special_tokens": [nothing], "added_tokens_decoder": {"7": nothing}}
    assert configured(config, {nothing: 8} if isinstance(nothing, str) else None) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("added_tokens.json", {"<a>": "x"}, "added_tokens.json: 'x' is not a token id"),
        ("added_tokens.json", {"<a>": -1}, "added_tokens.json: -1 is not a token id"),
        ("added_tokens.json", [], "added_tokens.json: expected an object, found list"),
        ("special_tokens_map.json", [], "special_tokens_map.json: expected an object, found list"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"²": {"content": "a"}}},
            "tokenizer_config.json: added_tokens_decoder: '²' is not a token id",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": []},
            "tokenizer_config.json: added_tokens_decoder: expected an object, found list",
        ),
    ],
)
def test_a_broken_file_is_named(name: str, value: object, message: str) -> None:
    files = {name: json.dumps(value).encode()}
    with pytest.raises(ModelError) as caught:
        configured_tokens(files.get, lambda _: None, 4)
    assert str(caught.value) == f"parse tokenizer: {message}"
