"""Grammars that are followed in the process of the test."""

from collections.abc import Callable

from protocol.format import Format
from runner.engine.answer_grammar import StateTape
from runner.grammar.compiler import Compiler
from runner.grammar.guide import Guide, taped_guide
from runner.grammar.matcher import GrammarMatcher
from runner.grammar.messages import Follow, State


class LocalGrammar:
    """A grammar for any number of answers. Raises RequestError as `Compiler.compile`."""

    def __init__(self, compiler: Compiler, wanted: Format) -> None:
        self._compiled, self._beginning = compiler.compile(wanted)
        self._size = compiler._size
        self.left_out = self._beginning.left_out
        self.late: Callable[[], int] = lambda: 0
        """Returns how many polls the next mask is late."""

    def guide(self, tape: StateTape | None = None) -> Guide | None:
        return taped_guide(tape, self.own_guide, self._size)

    def own_guide(self) -> Guide:
        return Guide(_LocalSource(self._compiled.copy(), self.late), self._beginning, self._size)

    def release(self) -> None:
        pass


class _LocalSource:
    """Computes each state in the thread that asks for it."""

    def __init__(self, matcher: GrammarMatcher, late: Callable[[], int]) -> None:
        self._matcher = matcher
        self._late = late
        self._polls_left = 0
        self._states: list[State] = []

    def send(self, step: Follow) -> None:
        self._polls_left = self._late()
        self._states.append(self._matcher.follow(step))

    def receive(self, patience_s: float) -> State | None:
        self._polls_left -= 1
        return self._states.pop(0) if self._polls_left < 0 else None

    def close(self) -> None:
        pass
