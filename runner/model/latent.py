"""Chooses the form of latent attention: mlx-lm's modules take the cheap one for a single token only.

Latent attention keeps one latent for each token, from which keys and values of all heads follow by a product. Keys and
values may be expanded from the latents of the whole context. Or queries are multiplied instead (absorbed), attend to
the latents as one head of keys and values, and their results are multiplied. The results are equal up to rounding.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Protocol, cast

import mlx.core as mx

_PRODUCTS = ("embed_q", "unembed_out")
_FEW = 16
"""New tokens up to which the absorbed form costs about as much as the other without a context, and less with one."""


class _Attention(Protocol):
    qk_nope_head_dim: int
    v_head_dim: int


def is_absorbed(queries: int, keys: int, rank: int, width: int) -> bool:
    """Returns True if the absorbed form takes fewer multiplications, for each head: with `queries` new tokens, `keys`
    tokens in all, latents of `rank` numbers, and keys and values of `width` numbers together. Also for a few new
    tokens: an answer rounds alike in steps and in rounds of drafts, alone and beside others."""
    return queries <= _FEW or queries * (width + 2 * keys) * rank <= keys * (rank + queries) * width


def choose_form(kind: type) -> None:
    """Makes a class of mlx-lm choose by `is_absorbed`, if it is a latent attention. Changes the class once. A class
    without a source, or without the known condition in it, keeps mlx-lm's form."""
    own = vars(kind).get("__call__")
    if inspect.isfunction(own) and {*_PRODUCTS} <= {*own.__code__.co_names} and "_is_absorbed" not in vars(kind):
        forward = _rewritten(own)
        if forward is not None:
            setattr(kind, "_is_absorbed", _choose)  # noqa: B010  mlx-lm's classes have no such method
            setattr(kind, "__call__", forward)  # noqa: B010


def _choose(self: _Attention, queries: int, latents: mx.array) -> bool:
    _, _, keys, rank = latents.shape
    return is_absorbed(queries, keys, rank, self.qk_nope_head_dim + self.v_head_dim)


class _Choices(ast.NodeTransformer):
    """Replaces the conditions of the absorbed form, `L == 1`, by `self._is_absorbed(L, kv_latent)`."""

    replaced = 0

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        match node.test:
            case ast.Compare(left=ast.Name(id=length), ops=[ast.Eq()], comparators=[ast.Constant(value=1)]):
                if any(isinstance(each, ast.Attribute) and each.attr in _PRODUCTS for each in ast.walk(node)):
                    self.replaced += 1
                    node.test = ast.parse(f"self._is_absorbed({length}, kv_latent)", mode="eval").body
        return node


def _rewritten(own: FunctionType) -> Callable[..., mx.array] | None:
    """Returns the forward of an attention with other conditions, or None if there are none. Its masks are arrays, as
    the absorbed form needs."""
    try:
        lines, first = inspect.getsourcelines(own)
    except OSError:  # an installation without sources
        return None
    choices = _Choices()
    tree = choices.visit(ast.parse(textwrap.dedent("".join(lines))))
    if not choices.replaced:
        return None
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    names: dict[str, object] = {}
    exec(compile(tree, own.__code__.co_filename, "exec"), own.__globals__, names)  # noqa: S102 - mlx-lm's own source
    make_mask = own.__globals__["create_attention_mask"]
    own.__globals__["create_attention_mask"] = partial(make_mask, return_array=True)
    return cast("Callable[..., mx.array]", names["__call__"])
