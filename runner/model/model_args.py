"""From a config to the arguments of mlx-lm's classes: each field that a file leaves out gets the default of its class.

A class of a module may hand a part of its config to the class of another, so this looks at all of them, in the one
method by which they read a config.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models.base import BaseModelArgs

from runner.errors import ModelError
from runner.model.families import Config

_METHOD = "from_dict"
_MAY_BE_NONE = re.compile(r"(typing\.)?(Optional\[.*\]|Any)|.*\| None")
Defaults = dict[str, object]
"""What counts for the fields that a config leaves out; None for those that a class demands and allows to be None."""


@contextmanager
def fill_model_args() -> Iterator[Defaults]:
    """Yields the defaults of mlx-lm's classes that have counted so far. For the thread that owns MLX.

    Inside, reading a config raises ModelError that names the fields which have no default either.
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
    """The defaults of `cls` for what `config` leaves out; those that are None say nothing."""
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
    """`config` with a null for each field that `cls` demands though it may be None; ModelError for the others."""
    told = dict(config)
    lacking = []
    defaults |= class_defaults(cls, config)
    for field in dataclasses.fields(cls):
        if field.name in told or not _is_demanded(field):
            continue
        if _MAY_BE_NONE.fullmatch(str(field.type)):
            told[field.name] = defaults[field.name] = None
        else:
            lacking.append(field.name)
    if lacking:
        raise ModelError(f"config.json does not fit {cls.__module__}: it lacks {', '.join(lacking)}")
    return told


def _is_demanded(field: "dataclasses.Field[object]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
