"""The recurrences of models, computed by one kernel over all tokens.

mlx-lm computes most recurrences token by token, with several operations each. `replace_loops` puts functions of this
package in the place of those loops, in mlx-lm's and mlx-vlm's modules. Read `kernel` first, which states the rules and
calls the kernel of the device; then `functions`, the functions that models call.

Owner: the engine thread, like every array.
"""

import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from runner.model.scans.functions import FUNCTIONS, METHODS

_MODELS = ("mlx_lm.models.", "mlx_vlm.models.", "runner.model.modules.")


def replace_loops() -> None:
    """Replaces the loops of all modules of models that were imported so far. Call it after each import of one: a module
    may have imported others, whose classes it uses."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(_MODELS):
            _replace(module, FUNCTIONS)
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    _replace(kind, METHODS)


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
