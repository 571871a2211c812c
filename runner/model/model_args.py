"""Fills the arguments of mlx-lm's model classes: a field missing from a config gets the default of its class.

A class may pass a part of its config on to a class of another module. So the defaults are filled in for all of them, in
the one method with which they read a config.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.base import BaseModelArgs

from runner.errors import ModelError
from runner.model.families import Config

_METHOD = "from_dict"
_MAY_BE_NONE = re.compile(r"(typing\.)?(Optional\[.*\]|Any)|.*\| None")
Defaults = dict[str, object]
"""Values for fields that a config leaves out; None for those that a class requires but allows to be None."""


@contextmanager
def fill_model_args() -> Iterator[Defaults]:
    """Fills missing fields while mlx-lm's classes read a config. Yields the defaults used so far.

    Inside the block, reading a config raises a ModelError that names the missing fields without a default. Only for the
    thread that owns MLX: it patches mlx-lm.
    """
    defaults: Defaults = {}
    genuine = BaseModelArgs.__dict__[_METHOD]

    def from_dict(cls: type[Any], config: Mapping[str, object]) -> object:
        return genuine.__func__(cls, _completed(cls, config, defaults))

    setattr(BaseModelArgs, _METHOD, classmethod(from_dict))
    try:
        yield defaults
    finally:
        setattr(BaseModelArgs, _METHOD, genuine)


def class_defaults(cls: type[Any], config: Mapping[str, object]) -> Defaults:
    """Returns the defaults of `cls` for fields that `config` leaves out, except those that are None."""
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

    Raises ModelError for other missing fields.
    """
    filled = dict(config)
    lacking = []
    defaults |= class_defaults(cls, config)
    for field in dataclasses.fields(cls):
        if field.name in filled or not _is_required(field):
            continue
        if _MAY_BE_NONE.fullmatch(str(field.type)):
            filled[field.name] = defaults[field.name] = None
        else:
            lacking.append(field.name)
    if lacking:
        raise ModelError(f"config.json does not fit {cls.__module__}: it lacks {', '.join(lacking)}")
    return filled


def _is_required(field: "dataclasses.Field[object]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
