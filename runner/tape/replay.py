"""Replays a tape: runs the slices of an engine again, each of which must come to the same."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from time import perf_counter
from typing import NamedTuple

import msgspec

from protocol.format import Format
from runner.assemble import assemble
from runner.engine.events import EventStream, Outbox
from runner.engine.guide import Grammar
from runner.engine.output import StopStrings
from runner.engine.ports import Tape
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.errors import RequestError, RunnerError
from runner.grammar.compiler import Compiler
from runner.model import OpenedModel
from runner.sampling import SamplingOptions
from runner.settings import Settings
from runner.tape.file import Arrived, TapeReader, Turn, turn_decoder
from runner.tape.grammar import TapedGrammar
from runner.tape.recorder import DiffersError, Player, TapeEnd
from runner.tape.requests import TapedRequests
from runner.tape.taps import TapedOutbox, TapedWorld
from runner.tokenizer import Tokenizer

_PROGRESS_SLICES = 1000


class Replayed(NamedTuple):
    """What a replay came to."""

    requests: int
    slices: int
    difference: str
    """The first difference, with its slice and both values; empty if everything was equal."""


class Replay:
    """Runs slices from a tape. Owner: the thread that owns MLX."""

    def __init__(
        self,
        player: Player,
        compile: Callable[[Format], Grammar],  # noqa: A002 - what it does
        vocab_size: int,
        wrap: Callable[[Grammar, Tape], Grammar] = TapedGrammar,
    ) -> None:
        """`compile` makes a grammar, and may raise RequestError; `wrap` gives it the states on the tape. The model has
        `vocab_size` tokens, 0 if that is unknown."""
        self._vocab_size = vocab_size
        self._compile = compile
        self.tape = player
        self.outbox = TapedOutbox(Outbox(asyncio.new_event_loop(), lambda deliver: deliver()), player)
        """The outbox for the engine."""
        self._requests = TapedRequests(self.outbox, player, wrap)
        self._formats: dict[int, Format] = {}

    def run(self, scheduler: Scheduler, tell: Callable[[int, int], None]) -> Replayed:
        """Runs all slices. Calls `tell` with the numbers of requests and slices, now and then."""
        difference = ""
        try:
            while True:
                self._run_slice(scheduler)
                if self.tape.slices % _PROGRESS_SLICES == 0:
                    tell(self._requests.count, self.tape.slices)
        except TapeEnd:
            pass
        except DiffersError as error:
            difference = str(error)
        return Replayed(self._requests.count, self.tape.slices, difference)

    def _run_slice(self, scheduler: Scheduler) -> None:
        """Does what `Engine._step` does."""
        turn = self.tape.next_turn()
        if isinstance(turn, bytes):
            self._take(_turn(turn), scheduler.add)
        scheduler.advance()
        _ = scheduler.idle  # the engine asks, and a mask may come meanwhile
        self.outbox.send()

    def _take(self, turn: Turn, add: Callable[[Request], None]) -> None:
        for arrived in turn.arrived:
            try:
                request = self._request(arrived)
            except (ValueError, msgspec.DecodeError) as error:
                raise RunnerError(f"unreadable: {error}") from None
            add(self._requests.arrive(request))
        for number in turn.left:
            self._requests.leave(number)
            self._formats.pop(number, None)
        for compiled in turn.compiled:
            wanted = self._formats.pop(compiled.number, None)
            if compiled.error:
                self._requests.compiled(compiled.number, compiled.error)
            elif wanted is not None:
                try:
                    self._requests.compiled(compiled.number, self._compile(wanted))
                except RequestError as error:
                    raise DiffersError(
                        f"slice {self.tape.slices}: recorded: the format of request {compiled.number} was compiled;"
                        f" replayed: {error}"
                    ) from None

    def _request(self, arrived: Arrived) -> Request:
        if arrived.format:
            self._formats[arrived.number] = msgspec.json.decode(arrived.format, type=Format)
        fields = dict(zip(SamplingOptions.__struct_fields__, arrived.sampling, strict=True))
        sampling = msgspec.convert(fields, SamplingOptions)
        tokens = [*arrived.prompt, *sampling.candidates]
        if not arrived.prompt or min(tokens) < 0 or max(tokens) >= (self._vocab_size or inf):
            raise RunnerError(f"request {arrived.number} has tokens that the model does not have")
        return Request(
            prompt=arrived.prompt,
            max_tokens=arrived.max_tokens,
            sampling=sampling,
            stops=StopStrings(arrived.stops) if arrived.stops else None,
            metered=arrived.metered,
            most_drafts=arrived.most_drafts,
            format=self._formats.get(arrived.number),
            grammar=Future() if arrived.format else None,
            stream=EventStream(),
            number=arrived.number,
        )


def _turn(data: bytes) -> Turn:
    try:
        return turn_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RunnerError(f"unreadable: {error}") from None


def replay(
    reader: TapeReader, settings: Settings, model: OpenedModel, tokenizer: Tokenizer, tell: Callable[[int, int], None]
) -> Replayed:
    """Loads the model, and replays a tape of it on this thread, which owns MLX from then on. Raises ModelError if the
    model cannot be loaded, and RunnerError for a tape that cannot be read."""
    player = Player(reader.entries())
    compiler = Compiler(tokenizer, model.vocab_size, inf)
    taped = Replay(player, compiler.compile, model.vocab_size)
    opening: Future[Tokenizer] = Future()
    opening.set_result(tokenizer)
    try:
        parts = assemble(settings, model, opening, taped.outbox, perf_counter(), lambda _: None, TapedWorld(player))
        parts.warm_up()
    except TapeEnd:
        return Replayed(0, 0, "")
    except DiffersError as error:
        return Replayed(0, 0, str(error))
    return taped.run(parts.scheduler, tell)
