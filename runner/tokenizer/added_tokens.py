"""Added tokens: texts beside the ordinary vocabulary that become one id wherever they occur."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from runner.errors import ModelError
from runner.logs import Log
from runner.tokenizer.model_files import Files, JsonObject, read_object, token_text

log = Log(__name__)

_LARGEST_ID = 2**31 - 1
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_ROLE_ENDING = "_token"
_TABLE = "added_tokens_decoder"
_ADDED, _MAP = "added_tokens.json", "special_tokens_map.json"
_END = ""
_Node = dict[str, "_Node"]
"""A node of a tree of texts: the branches by their characters. The key `_END` marks the end of a text."""


class AddedToken(NamedTuple):
    """An added token. Chat templates use `special` tokens as marks; all other added tokens are ordinary text.

    The flags are Hugging Face's. `single_word`: the text must be a whole word. `lstrip` and `rstrip`: the token
    includes white space on the left or right of the text. `normalized`: the text is searched in the normalized prompt.
    Without flags the text matches anywhere.
    """

    id: int
    content: str
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False

    @property
    def literal(self) -> "AddedToken":
        return AddedToken(self.id, self.content, self.special)


FLAGS = AddedToken._fields[2:]


def configured_tokens(
    files: Files, piece_id: Callable[[str], int | None], size: int, known: Iterable[AddedToken] = ()
) -> list[AddedToken]:
    """Returns `known` and the tokens that files beside a vocabulary of `size` pieces add to it, as transformers does.

    Ids come from `known`, then from `added_tokens_decoder` in `tokenizer_config.json`, whose flags replace those of
    `known`, then from `added_tokens.json`. A special token may be named without an id: by `tokenizer_config.json`, or
    by `special_tokens_map.json` if there is no `added_tokens_decoder`. Such a token gets the id of the piece with the
    same text, which `piece_id` returns, or else the next free id. Without an embedding for this id, the token stays
    text.

    Raises ModelError if a file has an unexpected shape. The message names the file.
    """
    config = special_config(read_object(files, "tokenizer_config.json"), read_object(files, _MAP))
    tokens = {token.content: token for token in known}
    ids = {token.id for token in tokens.values()}
    for token in _decoder_entries(config.get(_TABLE)):
        if token.content in tokens:
            tokens[token.content] = token._replace(id=tokens[token.content].id)
        elif token.id not in ids:
            tokens[token.content] = token
    named = {token.content: token for token in _special_tokens(config)}
    marks = {token.content for token in _special_tokens({**config, "pad_token": None})}
    taken = {token.id for token in tokens.values()}
    for text, token_id in _older_ids(files).items():
        if text not in tokens and token_id not in taken:
            tokens[text] = AddedToken(token_id, text, special=False, normalized=text not in named)
    free, rows = max([size, *(token.id + 1 for token in tokens.values())]), _rows(files)
    for text, token in named.items():
        if text in tokens:
            tokens[text] = tokens[text]._replace(special=True)
        elif (piece := piece_id(text)) is not None:
            if len(text) > 1 or text in marks:  # a model that pads with "!" also writes "!"
                tokens[text] = token._replace(id=piece)
        elif free < rows:
            tokens[text] = token._replace(id=free)
            free += 1
        else:
            message = "a special token has no id, and the model no row for a new one: it stays text"
            log.warning(message, token=text, id=free, rows=rows)
    return list(tokens.values())


def special_config(config: JsonObject, older: JsonObject) -> JsonObject:
    """Returns `config`, the content of `tokenizer_config.json`. Without an `added_tokens_decoder` in it, the fields of
    `older`, of `special_tokens_map.json`, replace its fields: older releases of transformers wrote both."""
    return config if _TABLE in config else {**config, **older}


def without_broken(files: Files, *, is_directory: bool) -> Files:
    """Returns `files` without broken files that the model's own program ignores: Ollama never reads `added_tokens.json`
    and `special_tokens_map.json`, transformers only without an `added_tokens_decoder`. The log names each of them.
    Raises ModelError if that program reads a broken one."""
    broken = set[str]()
    for name, read in ((_ADDED, _older_ids), (_MAP, partial(read_object, name=_MAP))):
        try:
            read(files)
        except ModelError as error:
            if is_directory and _TABLE not in read_object(files, "tokenizer_config.json"):
                raise
            log.warning("a broken file beside the tokenizer is ignored", file=name, reason=str(error))
            broken.add(name)
    return lambda name: None if name in broken else files(name)


def _older_ids(files: Files) -> dict[str, int]:
    """Returns the ids in `added_tokens.json` by the texts of their tokens."""
    found = read_object(files, _ADDED)
    return {text: _token_id(value, _ADDED) for text, value in found.items() if token_text(text) is not None}


def _rows(files: Files) -> int:
    """Returns the number of ids with an embedding, or a number above every id if the config has no such number."""
    config = read_object(files, "config.json")
    text = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, text) if isinstance(part, Mapping)]
    return max((size for size in sizes if type(size) is int), default=_LARGEST_ID)


def _decoder_entries(entries: object) -> Iterator[AddedToken]:
    """Yields the tokens in the `entries` of `added_tokens_decoder`: {id: {content, special, ...}}."""
    if entries is None:
        return
    place = f"tokenizer_config.json: {_TABLE}"
    if not isinstance(entries, dict):
        raise ModelError(f"parse tokenizer: {place}: expected an object, found {type(entries).__name__}")
    for key, entry in entries.items():
        text = token_text(entry)
        if text is not None:
            yield AddedToken(_token_id(key, place), text, **_flags(entry))


def _flags(entry: object) -> dict[str, bool]:
    """Returns the flags of an entry. Missing flags are False."""
    given = entry if isinstance(entry, dict) else {}
    return {name: given.get(name) is True for name in FLAGS}


def _token_id(value: object, place: str) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(_LARGEST_ID)):
        value = int(value)
    if type(value) is int and 0 <= value <= _LARGEST_ID:
        return value
    raise ModelError(f"parse tokenizer: {place}: {repr(value)[:40]} is not a token id")


def _special_tokens(config: JsonObject) -> Iterator[AddedToken]:
    """Yields the special tokens that a config names, with id -1; tokens with a role come first."""
    values = [config.get(role) for role in _ROLES]
    values += [value for key, value in config.items() if key.endswith(_ROLE_ENDING) and key not in _ROLES]
    for listed in map(config.get, _LISTED):
        if isinstance(listed, dict):  # transformers 5 writes an object by purpose
            listed = list(listed.values())
        values += listed if isinstance(listed, list) else []
    for value in values:
        text = token_text(value)
        if text is not None:
            yield AddedToken(-1, text, **{**_flags(value), "special": True})


def literal_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Compiles an expression that finds the leftmost occurrence of any of `texts`, and there the longest text. There
    must be at least one text, and none may be empty.

    Common prefixes occur once in the expression: a plain alternation would try thousands of texts at every `<`.
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
        while len(following) == 1:  # only one branch: no group is needed
            ((character, following),) = following.items()
            text += character
        branches.append(re.escape(text) + _expression(following))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
