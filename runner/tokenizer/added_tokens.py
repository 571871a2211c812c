"""Added tokens: texts that become one id wherever they occur, in addition to the ordinary vocabulary."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from runner.errors import ModelError
from runner.tokenizer.files import Files, JsonObject, read_object, token_text

_LARGEST_ID = 2**31 - 1
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


class AddedToken(NamedTuple):
    """An added token. `special` ones are marks set by chat templates; others are ordinary text in one token."""

    id: int
    content: str
    special: bool


def configured_tokens(files: Files, piece_id: Callable[[str], int | None], size: int) -> list[AddedToken]:
    """Returns the tokens that the files beside a `tokenizer.model` add to its `size` pieces.

    Ids come from `added_tokens_decoder` in `tokenizer_config.json`, then from `added_tokens.json`. A special token that
    only `tokenizer_config.json` or `special_tokens_map.json` names has the id of the piece with its spelling, found by
    `piece_id`, or else the next free id, as in transformers.

    Raises ModelError if one of the files has an unexpected shape; the message names it.
    """
    config = read_object(files, "tokenizer_config.json")
    named = dict.fromkeys(_special_texts(config, read_object(files, "special_tokens_map.json")))
    tokens = {token.content: token for token in _decoder_entries(config.get("added_tokens_decoder"))}
    taken = {token.id for token in tokens.values()}
    for text, value in read_object(files, "added_tokens.json").items():
        token_id = _token_id(value, "added_tokens.json")
        if text and text not in tokens and token_id not in taken:
            tokens[text] = AddedToken(token_id, text, special=False)
    free = max([size, *(token.id + 1 for token in tokens.values())])
    for text in named:
        if text in tokens:
            tokens[text] = tokens[text]._replace(special=True)
            continue
        known = piece_id(text)
        tokens[text] = AddedToken(free if known is None else known, text, special=True)
        free += known is None
    return list(tokens.values())


def _decoder_entries(entries: object) -> Iterator[AddedToken]:
    """Yields the tokens of `added_tokens_decoder`: {id: {content, special, ...}}; ignores its matching flags."""
    if entries is None:
        return
    place = "tokenizer_config.json: added_tokens_decoder"
    if not isinstance(entries, dict):
        raise ModelError(f"parse tokenizer: {place}: expected an object, found {type(entries).__name__}")
    for key, entry in entries.items():
        text = token_text(entry)
        if text is not None:
            yield AddedToken(_token_id(key, place), text, isinstance(entry, dict) and entry.get("special") is True)


def _token_id(value: object, place: str) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(_LARGEST_ID)):
        value = int(value)
    if type(value) is int and 0 <= value <= _LARGEST_ID:
        return value
    raise ModelError(f"parse tokenizer: {place}: {repr(value)[:40]} is not a token id")


def _special_texts(*sources: JsonObject) -> Iterator[str]:
    """Yields the texts of the special tokens, those with a role first."""
    values = [source.get(key) for key in _NAMED for source in sources]
    for source in sources:
        for key in _LISTED:
            listed = source.get(key)
            if isinstance(listed, dict):  # transformers 5 keys them by purpose
                listed = list(listed.values())
            values += listed if isinstance(listed, list) else []
    for value in values:
        text = token_text(value)
        if text is not None:
            yield text


# --- Builds a regular expression that finds the leftmost occurrence of many texts, and there the longest.

_END = ""
_Node = dict[str, "_Node"]


def literal_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Compiles one or more non-empty `texts`.

    Common prefixes are factored out: a plain alternation would try thousands of texts at every `<`.
    """
    root: _Node = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_expression(root))


def _expression(node: _Node) -> str:
    branches = []
    for character, following in node.items():
        if character == _END:
            continue
        text = character
        while len(following) == 1:  # no choice: go on without another level
            ((character, following),) = following.items()
            text += character
        branches.append(re.escape(text) + _expression(following))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
