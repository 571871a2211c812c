"""Completes the configs from which mlx-lm's classes of arguments (`ModelArgs`) are made.

Such a class may pass a part of its config to a class of another module. So the one method with which all these classes
read a config is patched.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.base import BaseModelArgs

from runner.errors import ModelError
from runner.model.architectures import Config

Defaults = dict[str, object]
"""Field -> value, for fields that a config lacks; None for a required field that is allowed to be None."""
_METHOD = "from_dict"
_MAY_BE_NONE = re.compile(r"(typing\.)?(Optional\[.*\]|Any)|.*\| None")


@contextmanager
def fill_model_args() -> Iterator[tuple[Defaults, list[Iterator[str]]]]:
    """Fills in missing fields of configs that mlx-lm's classes read in the block, or raises a ModelError that names
    fields without a default. Yields the defaults used so far, and the fields with odd values. Only the thread that owns
    MLX must use this function: it patches mlx-lm."""
    defaults: Defaults = {}
    odd: list[Iterator[str]] = []
    genuine = BaseModelArgs.__dict__[_METHOD]

    def from_dict(cls: type[Any], config: Mapping[str, object]) -> object:
        odd.append(_odd_fields(cls, config))
        wanted = inspect.signature(cls).parameters  # mlx-lm finds them anew for each field: a quarter of a small load
        return cls(**{name: value for name, value in _completed(cls, config, defaults).items() if name in wanted})

    setattr(BaseModelArgs, _METHOD, classmethod(from_dict))
    try:
        yield defaults, odd
    finally:
        setattr(BaseModelArgs, _METHOD, genuine)


_KINDS = {
    bool: "bool|any", int: "int|float|any", float: "float|int|any", str: "str|any", list: "list|tuple|any",
    dict: "dict|any",
}  # fmt: skip
"""Type of a value in JSON -> a pattern of the annotations that allow it."""
_LARGEST = 2**31


def _odd_fields(cls: type[Any], config: Mapping[str, object]) -> Iterator[str]:
    """Yields, as texts, the fields of `config` whose type or size may prevent `cls` from being made or used."""
    for field in dataclasses.fields(cls):
        value = config.get(field.name)
        if type(value) not in _KINDS:
            continue
        outer = re.sub(r"(dict|list|tuple)\[.*\]", r"\1", str(field.type).lower())
        if not re.search(_KINDS[type(value)], outer) or (isinstance(value, int | float) and not 0 <= value < _LARGEST):
            yield f"{field.name} is {value!r:.60}"


def class_defaults(cls: type[Any], config: Mapping[str, object]) -> Defaults:
    """Returns the defaults of `cls`, other than None, for fields that `config` lacks."""
    defaults: Defaults = {}
    for field in dataclasses.fields(cls):
        if field.name in config:
            continue
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING and field.default is not None:
            defaults[field.name] = field.default
    return defaults


def _completed(cls: type[Any], config: Mapping[str, object], defaults: Defaults) -> Config:
    """Returns `config` with None for each missing field that `cls` requires but allows to be None.

    Adds the defaults of missing fields to `defaults`. Raises ModelError if any other required field is missing.
    """
    filled = dict(config)
    lacking = []
    defaults |= class_defaults(cls, config)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in filled or not required:
            continue
        if _MAY_BE_NONE.fullmatch(str(field.type)):
            filled[field.name] = defaults[field.name] = None
        else:
            lacking.append(field.name)
    if lacking:
        raise ModelError(f"config.json does not fit {cls.__module__}: it lacks {', '.join(lacking)}")
    return filled
