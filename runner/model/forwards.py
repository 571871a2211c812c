"""Replaces parts of the forwards of mlx-lm's and mlx-vlm's modules by faster ones with the same results.

mlx-lm computes most recurrences token by token, with several operations each: the functions of `scans` compute all
tokens at once. `dbrx` does the same for experts, and `latent` chooses the cheaper form of latent attention.
"""

import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from runner.model.dbrx import mend_dbrx
from runner.model.latent import choose_form
from runner.model.scans.functions import FUNCTIONS, METHODS

_MODELS = ("mlx_lm.models.", "mlx_vlm.models.", "runner.model.modules.")


def replace_forwards() -> None:
    """Replaces these parts in all modules of models that were imported so far. Call it after each import of one: a
    module may have imported others, whose classes it uses."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(_MODELS):
            _replace(module, FUNCTIONS)
            mend_dbrx(module)
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    _replace(kind, METHODS)
                    if not name.startswith("mlx_vlm."):  # whose attention chooses by itself
                        choose_form(kind)


def _replace(owner: object, replacements: Mapping[str, Callable[..., Any]]) -> None:
    for name in replacements.keys() & vars(owner).keys():
        own = vars(owner)[name]
        if not hasattr(own, "__wrapped__"):
            setattr(owner, name, _bound(replacements[name], own))


def _bound(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with mlx-lm's own as its first argument, and with the signature of that."""

    def call(*args: object, **kwargs: object) -> object:
        return function(own, *args, **kwargs)

    return update_wrapper(call, own)
