"""Requests on a tape, and the recording of an engine.

A client may change its request at any time, on another thread. So the engine gets a copy of the request. The copy takes
over the client's changes only when a slice begins.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Annotated
from weakref import WeakKeyDictionary
from zlib import crc32

import msgspec

from runner.engine.answer_grammar import Grammar
from runner.engine.engine import Turns
from runner.engine.events import Event, EventStream, Failed, Finished, Outbox, Refused, Scored, Started, Text
from runner.engine.request import Request
from runner.errors import RequestError, RunnerError
from runner.logs import Log, exception_line
from runner.model import OpenedModel
from runner.sampling import SamplingOptions
from runner.settings import Settings
from runner.tape.file import TapeFile, check_recordable, header_of
from runner.tape.tape import EntryKind, Recorder, Tape, Value
from runner.tape.taped_grammar import TapedGrammar, TapedStates
from runner.tape.taped_world import TapedWorld
from runner.tokenizer.detokenizer import StopStrings

log = Log(__name__)
_Tokens = Annotated[list[int], msgspec.Meta(max_length=1 << 24)]
_Stops = Annotated[list[str], msgspec.Meta(max_length=1 << 16)]


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """A request that has left the mailbox."""

    number: int
    prompt: _Tokens
    max_tokens: int
    sampling: SamplingOptions
    """The sampling options, with the seed that was drawn."""
    stops: _Stops
    metered: bool
    most_drafts: int | None
    format: bytes
    """The format as JSON; empty for none. It is for people: a replay takes the grammar's states from the tape."""


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that was compiled or refused."""

    number: int
    error: str
    """The text of the refusal; empty for a compiled grammar."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """The outside events between two slices."""

    arrived: list[Arrived] = []
    left: list[int] = []
    """The numbers of the requests whose clients have left."""
    compiled: list[Compiled] = []


class TapedOutbox(Outbox):
    """An outbox that also notes the events on a tape. Owner: the engine thread."""

    def __init__(self, outbox: Outbox, tape: Tape) -> None:
        self._outbox = outbox
        self._tape = tape
        self.numbers: WeakKeyDictionary[EventStream, int] = WeakKeyDictionary()
        """The number of each stream's request."""

    def put(self, stream: EventStream, event: Event) -> None:
        self._tape.check(EntryKind.EVENT, [self.numbers[stream], *what_clients_read(event)])
        self._outbox.put(stream, event)

    def send(self) -> None:
        self._outbox.send()


def what_clients_read(event: Event) -> list[Value]:
    """Returns the parts of an event that a client reads, without durations; log-probabilities as a checksum."""
    match event:
        case Refused(text) | Failed(text):
            return [type(event).__name__.lower(), text]
        case Text(text, logprobs):
            return [text, crc32(msgspec.msgpack.encode(logprobs))] if logprobs else [text]
        case Scored(logprobs):
            return ["scored", crc32(msgspec.msgpack.encode(logprobs))]
        case Finished(reason, metrics):
            counts = (metrics.prompt_eval_count, metrics.prompt_eval_cached_count, metrics.eval_count)
            return ["finished", str(reason), *counts]
        case Started():
            return ["started"]


class TapedRequests:
    """The engine's own copies of requests. Owner: the engine thread."""

    def __init__(self, outbox: Outbox, tape: Tape, vocab_size: int = 0) -> None:
        """`vocab_size` is the size of the model's vocabulary; a replay needs it to check tokens."""
        self.outbox = TapedOutbox(outbox, tape)
        """The outbox that the engine uses."""
        self.count = 0
        """The number of requests that have arrived so far."""
        self._vocab_size = vocab_size
        self._states = TapedStates(tape)
        self._here: dict[int, Request] = {}

    def apply(
        self,
        turn: Turn,
        add: Callable[[Request], None],
        grammar_of: Callable[[int], Grammar],
        clients: Mapping[int, Request] | None = None,
    ) -> None:
        """Applies a turn to the requests. `add` queues a request. `grammar_of` returns the compiled grammar of a
        request's number. `clients` are the requests that clients hold, by number; a replay has none."""
        for arrived in turn.arrived:
            request = self._request(arrived, (clients or {}).get(arrived.number))
            self.count += 1
            self.outbox.numbers[request.stream] = request.number
            self._here[request.number] = request
            add(request)
        for number in turn.left:
            if (left := self._here.pop(number, None)) is not None:
                left.cancelled = True
        for compiled in turn.compiled:
            waiting = self._here.get(compiled.number)
            if waiting is None or waiting.grammar is None:
                continue
            if compiled.error:
                waiting.grammar.set_exception(RequestError(compiled.error))
            else:
                waiting.grammar.set_result(TapedGrammar(grammar_of(compiled.number), self._states))

    def _request(self, arrived: Arrived, client: Request | None) -> Request:
        request = Request(
            prompt=arrived.prompt,
            max_tokens=arrived.max_tokens,
            sampling=arrived.sampling,
            stops=StopStrings(arrived.stops) if arrived.stops else None,
            metered=arrived.metered,
            most_drafts=arrived.most_drafts,
            grammar=Future() if arrived.format else None,
            number=arrived.number,
        )
        if client is not None:
            request.stream = client.stream
            request.arrived_ns = client.arrived_ns
        elif not arrived.prompt or not all(
            0 <= token < self._vocab_size for token in (*arrived.prompt, *arrived.sampling.candidates)
        ):
            raise RunnerError(f"request {arrived.number} has tokens that the model does not have")
        return request


class Recording(Turns):
    """The turns of an engine that is recorded. Owner: the engine thread."""

    def __init__(self, tape: Recorder, outbox: Outbox) -> None:
        self.tape = tape
        self._requests = TapedRequests(outbox, tape)
        self.outbox = self._requests.outbox
        self._arrived: list[Request] = []
        self._clients: dict[int, Request] = {}  # the clients' own requests, whose flags any thread may change
        self._compiling: dict[int, Future[Grammar]] = {}

    def queue(self, add: Callable[[Request], None]) -> Callable[[Request], None]:  # noqa: ARG002 - `begin_slice` gets it too
        return self._arrived.append

    def begin_slice(self, add: Callable[[Request], None]) -> None:
        self.tape.on = True
        if not self._arrived and not self._clients:
            self.tape.check(EntryKind.TURN, None)
            return
        grammars: dict[int, Grammar] = {}
        turn = Turn([described(request) for request in self._arrived], [], [])
        for request in self._arrived:
            self._clients[request.number] = request
            if request.grammar is not None:
                self._compiling[request.number] = request.grammar
        self._arrived.clear()
        for number in [number for number, request in self._clients.items() if request.cancelled]:
            turn.left.append(number)
            self._compiling.pop(number, None)
        for number in [number for number, each in self._compiling.items() if each.done()]:
            found = _result(self._compiling.pop(number))
            if isinstance(found, str):
                turn.compiled.append(Compiled(number, found))
            elif found is not None:
                turn.compiled.append(Compiled(number, ""))
                grammars[number] = found
        is_empty = not (turn.arrived or turn.left or turn.compiled)
        self.tape.check(EntryKind.TURN, None if is_empty else msgspec.msgpack.encode(turn))
        self._requests.apply(turn, add, grammars.__getitem__, self._clients)
        for number in turn.left:
            del self._clients[number]

    def end_slice(self, *, idle: bool) -> None:
        self.tape.on = False
        if idle:
            self.tape.flush()


def described(request: Request) -> Arrived:
    """Returns the tape's entry for a request."""
    seed = request.sampling.seed
    if seed is None or seed < 0:
        seed = int.from_bytes(os.urandom(8), "little")
    return Arrived(
        request.number,
        request.prompt,
        request.max_tokens,
        msgspec.structs.replace(request.sampling, seed=seed),
        list(request.stops.texts) if request.stops is not None else [],
        request.metered,
        request.most_drafts,
        msgspec.json.encode(request.format) if request.format is not None else b"",
    )


def _result(compiling: "Future[Grammar]") -> Grammar | str | None:
    """Returns the grammar or the text of its error; None if the client is leaving."""
    if compiling.cancelled():
        return None
    error = compiling.exception()
    if error is None:
        return compiling.result()
    return str(error) if isinstance(error, RequestError) else exception_line(error)


def start_recording(settings: Settings, model: OpenedModel, outbox: Outbox) -> TapedWorld:
    """Creates the file, and returns the world that notes its values in the file. Raises UsageError if the file cannot
    be written, or if these settings cannot be recorded."""
    assert settings.record is not None
    check_recordable(settings, model)
    file = TapeFile(settings.record, header_of(settings, model))
    log.info("recording", file=str(file.path), why="--record; prompts and answers are in the file")
    tape = Recorder(file.write)
    return TapedWorld(tape, Recording(tape, outbox))
