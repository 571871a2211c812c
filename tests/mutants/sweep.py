"""`scripts/test --sweep MODULE... --by TEST...`: makes small mutants of modules and names those that no test notices.

Each mutant is one changed operator, constant, condition, result or statement of a function. A forked child puts the
changed code in the function's place and runs the tests that reach its line until one fails: first those that noticed
another mutant before, then the quickest. So the tests that are never the first to notice can be named, too. Modules and
tests that start processes, or that evaluate MLX while tests are collected, cannot be forked.
"""

import argparse
import ast
import copy
import gc
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pytest

from tests import ROOT

if TYPE_CHECKING:
    from _typeshed import TraceFunction

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
LIMIT_S = 3600.0
"""For all tests without a mutant."""
ROOM_S = 15.0
"""Beside the time that the tests of a mutant take, until a child counts as hung."""


class Mutant(NamedTuple):
    """A changed function."""

    path: str
    name: str
    """The qualified name of the outermost function."""
    line: int
    words: str
    code: CodeType


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what may take the place of a node."""
    match node:
        case ast.Compare(ops=[operator]):
            yield from (_changed(node, ops=[other()]) for other in OPERATORS[type(operator)])
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            yield from (_changed(node, op=other()) for other in OPERATORS.get(type(operator), ()))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value * 2 + 1)
        case ast.If():
            yield from (_changed(node, test=ast.Constant(value)) for value in (True, False))
        case ast.IfExp(body=first, orelse=second):
            yield from (first, second)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute()]):
            yield ast.Pass()


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


class Place(NamedTuple):
    """The place of a node in a tree."""

    parent: ast.AST
    field: str
    at: int | None
    """In a list of nodes."""

    def put(self, node: ast.AST) -> None:
        if self.at is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.at] = node


def functions(body: Sequence[ast.AST], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields the functions of a module and the methods of its classes, with their qualified names."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")


def nodes(function: ast.AST) -> Iterator[tuple[ast.AST, Place]]:
    """Yields what a function computes: no annotations, defaults, decorators, texts of errors, or lines of the log."""
    for field, value in ast.iter_fields(function):
        if field in UNCHANGED:
            continue
        for at, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.arguments) or _is_unread(node):
                continue
            yield node, Place(function, field, at)
            yield from nodes(node)


def _is_unread(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    return called is not node and getattr(called, "attr", getattr(called, "id", "")) in UNREAD


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields all of a file."""
    source = path.read_text()
    tree = ast.parse(source)
    for name, function in functions(tree.body):
        for node, place in list(nodes(function)):
            for change in changes(node):
                place.put(ast.fix_missing_locations(ast.copy_location(change, node)))
                code = _find(compile(tree, str(path), "exec"), name)
                place.put(node)
                line = getattr(node, "lineno", 0)
                words = f"{source.splitlines()[line - 1].strip()} -> {ast.unparse(change)}"
                yield Mutant(str(path), name, line, words, code)


def _find(code: CodeType, name: str) -> CodeType:
    """Returns the code of a function that is not local to another."""
    waiting = [code]
    while waiting:
        inner = [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
        if found := [each for each in inner if each.co_qualname == name]:
            return found[-1]
        waiting += inner
    raise LookupError(name)


class Sweep:
    """The plugin of pytest: takes the place of running the tests."""

    def __init__(self, paths: Sequence[Path], most: int, budget_s: float) -> None:
        self._paths = paths
        self._most = most
        self._budget_s = budget_s
        self._failed = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions = _functions_of(self._paths)
        reached = {name: (seconds, lines) for name, seconds, lines in self._reached(session.items)}
        tests = {item.nodeid: item for item in session.items}
        if left := tests.keys() - reached.keys():
            print(f"{len(left)} tests do not pass without a mutant, or wait for ever in a forked process: {min(left)}")
            session.testsfailed = 1
            return True
        mutants = [each for path in self._paths for each in mutants_of(path) if functions[each.path, each.name]]
        random.Random(1).shuffle(mutants)
        del mutants[self._most :]
        first, survivors = Counter[str](), list[str]()
        for count, mutant in enumerate(mutants, 1):
            names = [name for name, (_, lines) in reached.items() if (mutant.path, mutant.line) in lines]
            names.sort(key=lambda name: (name not in first, reached[name][0]))
            ends = accumulate(reached[name][0] for name in names)
            names = [name for name, end in zip(names, ends, strict=True) if end <= self._budget_s] or names[:1]
            if noticed := self._noticed(mutant, functions[mutant.path, mutant.name], [tests[name] for name in names]):
                first[noticed.partition("[")[0]] += 1
                first[noticed] += 1
            else:
                survivors.append(f"{Path(mutant.path).relative_to(ROOT)}:{mutant.line}: {mutant.words}")
            print(f"{count}/{len(mutants)}, {len(survivors)} not noticed", flush=True)
        print("", "Not noticed:", *sorted(survivors), sep="\n")
        print("", "First to notice none:", *sorted({name.partition("[")[0] for name in tests} - first.keys()), sep="\n")
        return True

    def _reached(self, items: Sequence[pytest.Item]) -> Iterator[tuple[str, float, set[tuple[str, int]]]]:
        """Yields each test that passes, with its time in seconds and the lines of the modules that it runs."""
        paths, lines = frozenset(map(str, self._paths)), set[tuple[str, int]]()

        def trace(frame: FrameType, _: str, __: object) -> "TraceFunction | None":
            path = frame.f_code.co_filename
            if path not in paths:
                return None
            lines.add((path, frame.f_lineno))
            return trace

        def run(say: Callable[[tuple[str, float, set[tuple[str, int]]]], None]) -> None:
            threading.settrace(trace)
            for item, following in zip(items, [*items[1:], None], strict=True):
                lines.clear()
                started = time.monotonic()
                sys.settrace(trace)
                passed = self._passes(item, following)
                sys.settrace(None)
                if passed:
                    say((item.nodeid, time.monotonic() - started, lines))

        yield from in_child(run, LIMIT_S)

    def _noticed(self, mutant: Mutant, functions: Sequence[FunctionType], items: Sequence[pytest.Item]) -> str:
        """Returns the test that fails, or in which the process or its time ends; empty if all pass."""

        def run(say: Callable[[str], None]) -> None:
            for function in functions:
                function.__code__ = mutant.code
            for item, following in zip(items, [*items[1:], None], strict=True):
                say(item.nodeid)
                if not self._passes(item, following):
                    return
            say("")

        *_, last = "", *in_child(run, 4 * self._budget_s + ROOM_S)
        return last

    def _passes(self, item: pytest.Item, following: pytest.Item | None) -> bool:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return item.nodeid not in self._failed


def _functions_of(paths: Sequence[Path]) -> dict[tuple[str, str], list[FunctionType]]:
    """Returns the functions of these files, by file and qualified name."""
    gc.unfreeze()  # the frozen are not listed
    found = defaultdict[tuple[str, str], list[FunctionType]](list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and Path(each.__code__.co_filename) in paths:
            found[each.__code__.co_filename, each.__code__.co_qualname].append(each)
    gc.freeze()
    return found


T = TypeVar("T")


def in_child(run: Callable[[Callable[[T], None]], None], limit_s: float) -> Iterator[T]:
    """Yields what a function says in a forked process, until that ends or has taken its time."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def child() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        run(writer.send)
        writer.close()
        os._exit(0)  # nothing of pytest's end

    process = context.Process(target=child)
    process.start()
    writer.close()
    until = time.monotonic() + limit_s
    try:
        while reader.poll(max(0.0, until - time.monotonic())):
            yield reader.recv()
    except EOFError:
        pass
    finally:
        reader.close()
        process.kill()
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test --sweep", description=__doc__.partition("\n")[0].partition(": ")[2]
    )
    parser.add_argument("modules", nargs="+", type=Path, metavar="MODULE", help="files or folders to change")
    parser.add_argument("--by", nargs="+", required=True, metavar="TEST", help="tests, as words for pytest")
    parser.add_argument("--most", type=int, default=200, help="mutants to try, drawn from all (default: 200)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of tests that one mutant may take (default: 10)")
    given = parser.parse_args()
    paths = [
        path.resolve() for each in given.modules for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each])
    ]
    arguments = ["-q", "-p", "no:cacheprovider", "-n0", *given.by]
    return int(pytest.main(arguments, plugins=[Sweep(paths, given.most, given.seconds)]))


if __name__ == "__main__":
    sys.exit(main())
