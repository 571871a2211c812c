"""An exception on any line of the cache, the sampler or a generation ends one request at most, and the others are
right, those that run beside it and those that come after it.

`test_any_call` breaks what is known to be able to break. Here nothing is known: Python's tracer raises on the n-th line
that a day of requests executes in these files, whatever stands there, with everything half done around it.
"""

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

import runner
from scripts.tools.models.tiny import KINDS
from tests.process.faults.bench import Bench
from tests.process.faults.test_any_call import ROOMY, SETUPS, SINGLE, TIGHT, Injector, Setup, calls, serve
from tests.process.faults.test_company import CLOSE, WIDE, serve_busy

pytestmark = pytest.mark.usefixtures("quiet")
_ROOT = Path(inspect.getfile(runner)).parent
_WATCHED = (
    *(f"{_ROOT / folder}/" for folder in ("cache", "sampling")),
    *(str(_ROOT / "engine" / name) for name in ("generation.py", "batch.py", "detokenizer.py")),
)
_ENGINE = str(_ROOT / "engine" / "scheduler.py")
assert all(Path(path).exists() for path in (*_WATCHED, _ENGINE))
_QUESTIONS = frozenset(
    {
        *("left", "accepts", "padded", "nbytes", "admits", "allows", "session_bytes", "__init__", "make_cache"),
        *("began", "prefilled", "stepped", "ended", "parts"),  # of the journal
        *("ready", "wait"),  # of groups whose grammars are being followed
        "tell",  # the clients
    }
)
"""What the engine asks or makes between two slices, by counting and comparing alone: a fault there ends the process."""
_GUARDED_INSIDE = frozenset({"follows", "reserve"})
"""What does the same, and sees to itself that nothing it calls comes out of it."""
_FIT = ("fit", "TrieCache._enforce_safely")
"""A question that has the cache fit its bound: what that calls is guarded."""
_ALL_OR_NOTHING = frozenset({"Generation.take", "Batch.take", "Batch.take.<locals>.<listcomp>"})
"""What has told one of a group of its token and not yet the next one. It calls what may fail within a guard."""
Tracer = Callable[[FrameType, str, object], object]
Serve = Callable[[str, Setup, Injector], Bench]
"""A day."""


class Lines(Injector):
    """Counts the lines that a day executes, and raises on one of them."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.watched = ()
        self.faults = {"python memory"}
        self.at = at
        self.count = 0
        self.where = ""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Python ends it by itself when the tracer raises: no second line breaks."""
        before = sys.gettrace()
        sys.settrace(self._enter)  # type: ignore[arg-type]  # what it returns is one again
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Tracer | None:
        return self._line if frame.f_code.co_filename.startswith(_WATCHED) and not _of_the_engine(frame) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Tracer:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.struck += 1
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise MemoryError
        return self._line


def _of_the_engine(frame: FrameType) -> bool:
    """Whether this is a question of the engine, or is called by one."""
    below = frame
    while below.f_back is not None and below.f_back.f_code.co_filename != _ENGINE:
        below = below.f_back
    if frame.f_code.co_qualname in _ALL_OR_NOTHING:
        return True
    asked, asking = below.f_code.co_name, below.f_back
    guarded = asking is not None and (asking.f_code.co_name, asked) == ("_begin", "__init__")  # of a generation
    if asked == _FIT[0]:
        return not _is_within(frame, _FIT[1])
    return (asked in _QUESTIONS and not guarded) or (asked in _GUARDED_INSIDE and frame is below)


def _is_within(frame: FrameType, name: str) -> bool:
    """Whether a function of this qualified name has called it."""
    above = frame.f_back
    while above is not None and above.f_code.co_qualname != name:
        above = above.f_back
    return above is not None


@cache
def lines_of(kind: str, setup: Setup, serve: Serve) -> int:
    """How many lines a day without a fault executes."""
    calls(kind, setup)  # what is computed once for all days
    serve(kind, setup, Injector())
    lines = Lines()
    serve(kind, setup, lines)
    return lines.count


def break_lines(kind: str, setup: Setup, times: int, chance: random.Random, serve: Serve = serve) -> set[str]:
    """So many days with a broken line each; returns which lines."""
    broken = set()
    for _ in range(times):
        lines = Lines(chance.randrange(1, lines_of(kind, setup, serve) + 1))
        try:
            serve(kind, setup, lines)
        except BaseException as error:
            error.add_note(f"{kind} {setup}: line number {lines.at}, {lines.where}, was broken")
            raise
        assert lines.struck == 1
        broken.add(lines.where)
    return broken


@pytest.mark.parametrize(
    ("kind", "setup"),
    [("llama", ROOMY), ("gemma3", TIGHT), ("qwen3_next", ROOMY), ("gemma3", SINGLE)],
    ids=str,
)
def test_a_broken_line_ends_one_request(kind: str, setup: Setup) -> None:
    assert len(break_lines(kind, setup, 3, random.Random(f"{kind} {setup}"))) > 1


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_a_broken_line_in_company_ends_one_request(kind: str) -> None:
    assert len(break_lines(kind, WIDE, 3, random.Random(kind), serve_busy)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("setup", [WIDE, CLOSE], ids=["wide", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_broken_line_in_company_ends_one_request(kind: str, setup: Setup) -> None:
    assert len(break_lines(kind, setup, 12, random.Random(), serve_busy)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["roomy", "tight", "single", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_broken_line_ends_one_request(kind: str, setup: Setup) -> None:
    assert len(break_lines(kind, setup, 8, random.Random())) > 3
