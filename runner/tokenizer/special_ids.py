"""Finds the ids that begin and end a text; of three files, the first that names one wins.

See docs/internals/wire.md, 2.8.
"""

from collections.abc import Mapping
from typing import NamedTuple

from runner.tokenizer.files import Files, JsonObject, read_object, token_text

_NOTHING: JsonObject = {}


class SpecialIds(NamedTuple):
    """The ids that begin and end a text. `add_bos` is true if prompts must begin with BOS."""

    bos: int | None
    eos: frozenset[int]
    add_bos: bool


def resolve_special_ids(
    files: Files, added: Mapping[str, int], *, own: JsonObject = _NOTHING, merge_eos: bool = False
) -> SpecialIds:
    """Finds BOS and EOS; `added` maps the text of every added token to its id.

    Ids come from `generation_config.json`, else `config.json` (top level), else from the token texts in
    `tokenizer_config.json`, else from those in `own`, which the vocabulary itself names. BOS and EOS are looked up
    separately, and lists are never merged. A negative id means none.

    With `merge_eos`, the `eos_token` of `tokenizer_config.json`, else of `special_tokens_map.json`, ends a text too, in
    addition to the ids: mlx-lm stops at both.

    Raises:
        ModelError: one of the files is not a JSON object.
    """
    numbered = [read_object(files, "generation_config.json"), read_object(files, "config.json")]
    config = read_object(files, "tokenizer_config.json")
    named = [config, read_object(files, "special_tokens_map.json"), own] if merge_eos else [config, own]
    bos = _first_ids(numbered, "bos_token_id") or _first_named(named, "bos_token", added)
    eos, ends = _first_ids(numbered, "eos_token_id"), _first_named(named, "eos_token", added)
    return SpecialIds(
        bos=bos[0] if bos else None,
        eos=frozenset([*eos, *ends] if merge_eos else eos or ends),
        add_bos=bool(bos) and config.get("add_bos_token") is True,
    )


def _first_ids(sources: list[JsonObject], key: str) -> list[int]:
    return next((ids for source in sources if (ids := _ids(source.get(key)))), [])


def _ids(value: object) -> list[int]:
    """Returns the ids in an integer or a list of integers; everything else counts as absent."""
    values = value if isinstance(value, list) else [value]
    numbers = [v for v in values if (type(v) is float and v.is_integer()) or type(v) is int]
    return [int(number) for number in numbers if number >= 0]


def _first_named(sources: list[JsonObject], key: str, added: Mapping[str, int]) -> list[int]:
    """Returns the id of the first token text that is an added token."""
    texts = (token_text(source.get(key)) for source in sources)
    return next(([added[text]] for text in texts if text is not None and text in added), [])
