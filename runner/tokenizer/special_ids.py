"""Finds the ids that begin and end a text. The first file that names an id decides.

The rules are in docs/internals/wire.md, 2.8.
"""

from collections.abc import Mapping
from typing import NamedTuple

from runner.tokenizer.added_tokens import special_config
from runner.tokenizer.model_files import Files, JsonObject, read_object, token_text

_NOTHING: JsonObject = {}


class SpecialIds(NamedTuple):
    """The ids that begin and end a text. `add_bos` is True if prompts must begin with BOS."""

    bos: int | None
    eos: frozenset[int]
    add_bos: bool
    end: int | None = None
    """The first id of `eos` in the order of the files, or None."""


def resolve_special_ids(
    files: Files, added: Mapping[str, int], *, own: JsonObject = _NOTHING, merge_eos: bool = False
) -> SpecialIds:
    """Finds BOS and EOS. `added` maps the text of every added token to the id of the token.

    The sources, for BOS and for EOS separately, are: the ids in `generation_config.json`; the ids in `config.json` (top
    level); the token text in `tokenizer_config.json`; the text in `own`, which the vocabulary itself names; the text in
    `special_tokens_map.json`; for EOS, the ids in the `text_config` of `config.json`. The first source with an id
    decides; lists are never merged. Negative ids are ignored.

    With `merge_eos`, EOS has the id of the token text in addition to the ids, as in mlx-lm, and `text_config` comes
    right after `config.json`, as in transformers.

    Raises ModelError if one of the files is not a JSON object.
    """
    generation, model = read_object(files, "generation_config.json"), read_object(files, "config.json")
    config, older = read_object(files, "tokenizer_config.json"), read_object(files, "special_tokens_map.json")
    nested = model.get("text_config")
    text_config = nested if isinstance(nested, dict) else _NOTHING
    numbered = [generation, model, text_config] if merge_eos else [generation, model]
    named = [special_config(config, older), older, own] if merge_eos else [config, own, older]
    bos = _first_ids(numbered, "bos_token_id") or _first_named(named, "bos_token", added)
    eos, ends = _first_ids(numbered, "eos_token_id"), _first_named(named, "eos_token", added)
    if not eos and not ends:
        ends = _first_ids([text_config], "eos_token_id")
    return SpecialIds(
        bos=bos[0] if bos else None,
        eos=frozenset([*eos, *ends] if merge_eos else eos or ends),
        add_bos=bool(bos) and config.get("add_bos_token") is True,
        end=next(iter((*eos, *ends)), None),
    )


def _first_ids(sources: list[JsonObject], key: str) -> list[int]:
    return next((ids for source in sources if (ids := _ids(source.get(key)))), [])


def _ids(value: object) -> list[int]:
    """Returns the ids in an integer or a list of integers, without negative ids. Ignores everything else."""
    values = value if isinstance(value, list) else [value]
    numbers = [v for v in values if (type(v) is float and v.is_integer()) or type(v) is int]
    return [int(number) for number in numbers if number >= 0]


def _first_named(sources: list[JsonObject], key: str, added: Mapping[str, int]) -> list[int]:
    """Returns the id of the first text in the sources that is an added token, or an empty list."""
    texts = (token_text(source.get(key)) for source in sources)
    return next(([added[text]] for text in texts if text is not None and text in added), [])
