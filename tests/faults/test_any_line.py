"""An exception on any line of the cache, the sampler or a generation ends one request, and the next are right.

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
from tests.cache.tiny import KINDS
from tests.faults.test_any_call import ROOMY, SETUPS, SINGLE, TIGHT, Injector, Setup, calls, serve

pytestmark = pytest.mark.usefixtures("quiet")
_ROOT = Path(inspect.getfile(runner)).parent
_WATCHED = (
    *(f"{_ROOT / folder}/" for folder in ("cache", "sampling")),
    str(_ROOT / "engine" / "generation.py"),
    str(_ROOT / "engine" / "text.py"),
)
_OF_THE_ENGINE = ("done", "report")
"""What the engine asks a generation between two slices: a fault there ends the process."""
Tracer = Callable[[FrameType, str, object], object]


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
        code = frame.f_code
        return self._line if code.co_filename.startswith(_WATCHED) and code.co_name not in _OF_THE_ENGINE else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Tracer:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.struck += 1
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise MemoryError
        return self._line


@cache
def lines_of(kind: str, setup: Setup) -> int:
    """How many lines a day without a fault executes."""
    calls(kind, setup)  # what is computed once for all days
    lines = Lines()
    serve(kind, setup, lines)
    return lines.count


def break_lines(kind: str, setup: Setup, times: int, chance: random.Random) -> set[str]:
    """So many days with a broken line each; returns which lines."""
    broken = set()
    for _ in range(times):
        lines = Lines(chance.randrange(1, lines_of(kind, setup) + 1))
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


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["roomy", "tight", "single", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_broken_line_ends_one_request(kind: str, setup: Setup) -> None:
    assert len(break_lines(kind, setup, 8, random.Random())) > 3
