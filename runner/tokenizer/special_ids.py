"""Which ids begin and end a text: three files have a say, the first that names one wins.

See docs/internals/wire.md, 2.8.
"""

from collections.abc import Mapping
from typing import NamedTuple

from runner.tokenizer.files import Files, JsonObject, read_object, token_text

_NOTHING: JsonObject = {}


class SpecialIds(NamedTuple):
    """The beginning and the ends of a text."""

    bos: int | None
    eos: frozenset[int]
    add_bos: bool


def resolve_special_ids(
    files: Files, added: Mapping[str, int], *, own: JsonObject = _NOTHING, merge_eos: bool = False
) -> SpecialIds:
    """Read BOS and EOS; `added` maps the text of every added token to its id.

    Ids come from `generation_config.json`, else `config.json` (top level), else the token texts of
    `tokenizer_config.json`, else those in `own`, which the vocabulary itself names. BOS and EOS are looked up apart
    from each other, and lists are never merged. A negative id means none.

    With `merge_eos` the text that `tokenizer_config.json`, or else `special_tokens_map.json`, calls `eos_token` is an
    end too, whatever the ids are: mlx-lm stops at both.

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
    """A whole number or a list of them; everything else counts as absent."""
    values = value if isinstance(value, list) else [value]
    numbers = [v for v in values if (type(v) is float and v.is_integer()) or type(v) is int]
    return [int(number) for number in numbers if number >= 0]


def _first_named(sources: list[JsonObject], key: str, added: Mapping[str, int]) -> list[int]:
    """The id of the first token text that is an added token."""
    texts = (token_text(source.get(key)) for source in sources)
    return next(([added[text]] for text in texts if text is not None and text in added), [])
