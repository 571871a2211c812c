"""The requests of an engine with a tape: they change only between two slices.

What a client does to its request happens at any time, on another thread. So the engine gets a copy, which takes over
what happened to the original when a slice begins, and only then.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from runner.engine.guide import Grammar
from runner.engine.ports import Tape
from runner.engine.request import Request
from runner.errors import RequestError
from runner.logs import error_line
from runner.tape.file import Arrived, Compiled, Turn
from runner.tape.grammar import TapedGrammar
from runner.tape.taps import TapedOutbox


class TapedRequests:
    """The requests that the engine has, by number. Owner: the engine thread."""

    def __init__(
        self, outbox: TapedOutbox, tape: Tape, wrap: Callable[[Grammar, Tape], Grammar] = TapedGrammar
    ) -> None:
        """`wrap` puts the states of a compiled grammar on the tape."""
        self._outbox, self._tape, self._wrap = outbox, tape, wrap
        self._here: dict[int, Request] = {}
        self.count = 0
        """The number of requests so far."""

    def arrive(self, request: Request) -> Request:
        """Returns the request for the engine, whose grammar is yet to be compiled."""
        self.count += 1
        self._outbox.numbers[request.stream] = request.number
        self._here[request.number] = request
        return request

    def leave(self, number: int) -> None:
        """Cancels a request for the engine."""
        if (request := self._here.pop(number, None)) is not None:
            request.cancelled = True

    def compiled(self, number: int, grammar: Grammar | str) -> None:
        """Gives a request its grammar, or the error."""
        request = self._here.get(number)
        if request is None or request.grammar is None:
            return
        if isinstance(grammar, str):
            request.grammar.set_exception(RequestError(grammar))
        else:
            request.grammar.set_result(self._wrap(grammar, self._tape))


class Originals:
    """The requests as their clients know them. Owner: the engine thread; their flags change on any."""

    def __init__(self) -> None:
        self._arrived: list[Request] = []
        self._here: dict[int, Request] = {}
        self._compiling: dict[int, Future[Grammar]] = {}

    def add(self, request: Request) -> None:
        """Adds a request that has left the mailbox."""
        self._arrived.append(request)

    def take_turn(self, requests: TapedRequests, add: Callable[[Request], None]) -> Turn | None:
        """Hands on what has happened since the last turn, and returns it; None if nothing has. `add` queues a
        request."""
        if not self._arrived and not self._here:
            return None
        turn = Turn([], [], [])
        for original in self._arrived:
            copy = _copy(original)
            turn.arrived.append(described(copy))
            self._here[original.number] = original
            if original.grammar is not None:
                self._compiling[original.number] = original.grammar
            add(requests.arrive(copy))
        self._arrived = []
        for number in [number for number, each in self._here.items() if each.cancelled]:
            turn.left.append(number)
            self._compiling.pop(number, None)
            del self._here[number]
            requests.leave(number)
        for number in [number for number, each in self._compiling.items() if each.done()]:
            grammar = _result(self._compiling.pop(number))
            if grammar is not None:
                turn.compiled.append(Compiled(number, grammar if isinstance(grammar, str) else ""))
                requests.compiled(number, grammar)
        return turn if turn.arrived or turn.left or turn.compiled else None


def _copy(original: Request) -> Request:
    seed = original.sampling.seed
    if seed is None or seed < 0:
        seed = int.from_bytes(os.urandom(8), "little")
    sampling = msgspec.structs.replace(original.sampling, seed=seed)
    return replace(original, sampling=sampling, grammar=None if original.grammar is None else Future())


def _result(compiling: "Future[Grammar]") -> Grammar | str | None:
    """Returns the grammar or the error; None if its client is leaving."""
    if compiling.cancelled():
        return None
    error = compiling.exception()
    if error is None:
        return compiling.result()
    return str(error) if isinstance(error, RequestError) else error_line(error)


def described(request: Request) -> Arrived:
    """Returns what a tape says of a request."""
    return Arrived(
        request.number,
        request.prompt,
        request.max_tokens,
        msgspec.to_builtins([*msgspec.structs.astuple(request.sampling)]),
        list(request.stops.texts) if request.stops is not None else [],
        request.metered,
        request.most_drafts,
        msgspec.json.encode(request.format) if request.format is not None else b"",
    )
