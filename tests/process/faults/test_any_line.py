"""An exception on any line of the cache, the sampler or a generation ends at most one request; concurrent and later
answers are right.

`test_any_call` raises faults at known points. Here Python's tracer raises on the n-th line that a workload executes in
these files, whatever that line does and however much is half done around it.
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
from tests.process.faults.driven_engine import DrivenEngine
from tests.process.faults.test_any_call import ROOMY, SETUPS, SINGLE, TIGHT, Injector, Setup, calls, serve
from tests.process.faults.test_any_call_concurrent import CLOSE, WIDE, serve_concurrently

pytestmark = pytest.mark.usefixtures("quiet")
_ROOT = Path(inspect.getfile(runner)).parent
_WATCHED = (
    *(f"{_ROOT / folder}/" for folder in ("cache", "drafts", "sampling")),
    *(str(_ROOT / "engine" / name) for name in ("generation.py", "batch.py", "output/detokenizer.py")),
    *(str(_ROOT / "engine" / name) for name in ("round.py", "drafting.py")),
)
_ENGINE = str(_ROOT / "engine" / "scheduler.py")
assert all(Path(path).exists() for path in (*_WATCHED, _ENGINE))
_UNGUARDED = frozenset(
    {
        *("left", "accepts", "padded", "nbytes", "admits", "allows", "session_bytes", "__init__", "make_cache"),
        *("began", "prefilled", "stepped", "ended", "parts"),  # of the journal
        *("ready", "wait"),  # of batches with grammars
        "tell",  # sends events to clients
    }
)
"""Calls of the engine between two slices that only count and compare: a fault there ends the process."""
_GUARDS_ITSELF = frozenset({"follows", "reserve"})
"""Calls of the same kind that catch the faults of what they call."""
_FIT = ("fit", "TrieCache._enforce_safely")
"""A call of the same kind that makes the cache fit its bound, and the function within which faults are caught."""
_ALL_OR_NOTHING = frozenset({"Generation.take", "Batch.take", "Batch.take.<locals>.<listcomp>"})
"""Functions that deliver tokens to the rows of a batch one after another. They guard the calls that may fail."""
Tracer = Callable[[FrameType, str, object], object]
Serve = Callable[[str, Setup, Injector], DrivenEngine]
"""Serves a workload."""


class Lines(Injector):
    """Counts the lines that a workload executes and raises on one of them."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.watched = ()
        self.faults = {"python memory"}
        self.at = at
        self.count = 0
        self.where = ""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Traces one wave. Python stops tracing when the tracer raises, so only one line fails."""
        before = sys.gettrace()
        sys.settrace(self._enter)  # type: ignore[arg-type]  # what it returns is one again
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Tracer | None:
        return self._line if frame.f_code.co_filename.startswith(_WATCHED) and not _is_unguarded(frame) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Tracer:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.raised += 1
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise MemoryError
        return self._line


def _is_unguarded(frame: FrameType) -> bool:
    """Returns True if the frame is one of the engine's unguarded calls, or is called by one."""
    below = frame
    while below.f_back is not None and below.f_back.f_code.co_filename != _ENGINE:
        below = below.f_back
    if frame.f_code.co_qualname in _ALL_OR_NOTHING:
        return True
    asked, asking = below.f_code.co_name, below.f_back
    guarded = asking is not None and (asking.f_code.co_name, asked) == ("_begin", "__init__")  # of a generation
    if asked == _FIT[0]:
        return not _is_within(frame, _FIT[1])
    return (asked in _UNGUARDED and not guarded) or (asked in _GUARDS_ITSELF and frame is below)


def _is_within(frame: FrameType, name: str) -> bool:
    """Returns True if a function of this qualified name is among the callers."""
    above = frame.f_back
    while above is not None and above.f_code.co_qualname != name:
        above = above.f_back
    return above is not None


@cache
def lines_of(kind: str, setup: Setup, serve: Serve) -> int:
    """Returns the number of lines that a workload without a fault executes."""
    calls(kind, setup)  # fills what is computed only once
    serve(kind, setup, Injector())
    lines = Lines()
    serve(kind, setup, lines)
    return lines.count


def fail_lines(kind: str, setup: Setup, times: int, chance: random.Random, serve: Serve = serve) -> set[str]:
    """Serves the workload this many times with a fault on a random line each; returns these lines."""
    failed_lines = set()
    for _ in range(times):
        lines = Lines(chance.randrange(1, lines_of(kind, setup, serve) + 1))
        try:
            serve(kind, setup, lines)
        except BaseException as error:
            error.add_note(f"{kind} {setup}: the fault was raised on line number {lines.at}, {lines.where}")
            raise
        assert lines.raised == 1
        failed_lines.add(lines.where)
    return failed_lines


@pytest.mark.parametrize(
    ("kind", "setup"),
    [("llama", ROOMY), ("gemma3", TIGHT), ("qwen3_next", ROOMY), ("gemma3", SINGLE)],
    ids=str,
)
def test_a_fault_on_a_line_ends_one_request(kind: str, setup: Setup) -> None:
    assert len(fail_lines(kind, setup, 3, random.Random(f"{kind} {setup}"))) > 1


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_a_fault_on_a_line_ends_one_of_several_requests(kind: str) -> None:
    assert len(fail_lines(kind, WIDE, 3, random.Random(kind), serve_concurrently)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("setup", [WIDE, CLOSE], ids=["wide", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_on_any_line_ends_one_of_several_requests(kind: str, setup: Setup) -> None:
    assert len(fail_lines(kind, setup, 12, random.Random(), serve_concurrently)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["roomy", "tight", "single", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_on_any_line_ends_one_request(kind: str, setup: Setup) -> None:
    assert len(fail_lines(kind, setup, 8, random.Random())) > 3
