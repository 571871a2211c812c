"""`scripts/test --sweep MODULE... --by TEST...`: makes small mutants of modules and names those that no test notices.

Each mutant is one changed operator, constant, condition, result or statement of a function, and is tried as the rows of
the tables are.
"""

import argparse
import ast
import copy
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from tests import ROOT
from tests.mutants import Mutant
from tests.mutants.__main__ import try_all

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,),
    ast.Mod: (ast.Add,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
UNREAD = frozenset(("cast", "debug", "info", "warning", "exception"))
"""Calls whose arguments no test needs to notice."""
UNCHANGED = frozenset(("annotation", "returns", "decorator_list", "exc"))
"""Fields of nodes that compute nothing that a test needs to notice."""


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Yields parts of a node, each with what may take its place."""
    match node:
        case ast.Compare(ops=[operator]):
            yield from ((node, _changed(node, ops=[other()])) for other in OPERATORS[type(operator)])
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            yield from ((node, _changed(node, op=other())) for other in OPERATORS.get(type(operator), ()))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value * 2 + 1)
        case ast.If(test=test):
            yield from ((test, ast.Constant(value)) for value in (True, False))
        case ast.IfExp(body=first, orelse=second):
            yield from ((node, first), (node, second))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, ast.Constant(None)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue():
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute()]):
            yield node, ast.Pass()


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def functions(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yields the functions of a module and the methods of its classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body)


def nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yields what a function computes: no annotations, defaults, decorators, texts of errors, or lines of the log."""
    for field, value in ast.iter_fields(function):
        for node in value if isinstance(value, list) else [value]:
            unread = isinstance(node, ast.Assert | ast.arguments | ast.JoinedStr) or _is_unread(node)
            if isinstance(node, ast.AST) and field not in UNCHANGED and not unread:
                yield node
                yield from nodes(node)


def _is_unread(node: object) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) in UNREAD


def mutants_of(path: Path, by: str) -> Iterator[Mutant]:
    """Yields all of a file."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    for function in functions(ast.parse(source).body):
        for node in nodes(function):
            for old, new in changes(node):
                first = starts[old.lineno - 1] + old.col_offset
                last = first + len((ast.get_source_segment(source.decode(), old) or "").encode())
                text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
                changed = source[:first] + text.encode() + source[last:]
                words = f"{old.lineno}: {lines[old.lineno - 1].decode().strip()} -> {ast.unparse(new)}"
                file = str(path.relative_to(ROOT))
                yield Mutant("sweep", file, words, source.decode(), changed.decode(), by)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test --sweep", description=__doc__.partition("\n")[0].partition(": ")[2]
    )
    parser.add_argument("modules", nargs="+", type=Path, metavar="MODULE", help="files or folders to change")
    parser.add_argument("--by", nargs="+", required=True, metavar="TEST", help="tests, as words for pytest")
    parser.add_argument("--most", type=int, default=200, help="mutants to try, drawn from all (default: 200)")
    given = parser.parse_args()
    paths = [
        path.resolve() for each in given.modules for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each])
    ]
    found = [mutant for path in paths for mutant in mutants_of(path, " ".join(given.by))]
    random.Random(1).shuffle(found)
    return try_all(found[: given.most])


if __name__ == "__main__":
    raise SystemExit(main())
