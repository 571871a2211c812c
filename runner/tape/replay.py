"""Replays a tape: runs the slices of an engine again. Each slice must produce the recorded results."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import NamedTuple

import msgspec

from runner.assemble import assemble
from runner.engine.answer_grammar import Grammar
from runner.engine.engine import Turns
from runner.engine.events import Outbox
from runner.engine.parts import Parts
from runner.engine.scheduler import Scheduler
from runner.errors import RunnerError
from runner.model import OpenedModel
from runner.settings import Settings
from runner.tape.file import TapeReader
from runner.tape.recording import TapedRequests, Turn
from runner.tape.tape import DiffersError, Player, TapeEnd
from runner.tape.taped_world import TapedWorld
from runner.tokenizer import Tokenizer

_PROGRESS_SLICES = 1000


class Replayed(NamedTuple):
    """The outcome of a replay."""

    requests: int
    slices: int
    difference: str
    """The first difference, with the number of its slice and both values; empty if all results were equal."""


class Replay:
    """Runs slices from a tape. Owner: the thread that owns MLX."""

    def __init__(self, player: Player, vocab_size: int) -> None:
        """`vocab_size` is the number of tokens in the model's vocabulary."""
        self.tape = player
        outbox = Outbox(asyncio.new_event_loop(), lambda deliver: deliver())
        self._vocab_size = vocab_size
        self._requests = TapedRequests(outbox, player, vocab_size)
        self.turns = Turns(self._requests.outbox)
        """The turns of the engine's world. Only the outbox is used."""

    def run(
        self, scheduler: Scheduler, grammar: Callable[[int], Grammar], report: Callable[[int, int], None]
    ) -> Replayed:
        """Runs all slices. `grammar` is the method `replayed` of the port `Formats`. Calls `report` now and then with
        the numbers of requests and slices so far."""
        difference = ""

        def grammar_of(_: int) -> Grammar:
            return grammar(self._vocab_size)

        try:
            while True:
                self._run_slice(scheduler, grammar_of)
                if self.tape.slices % _PROGRESS_SLICES == 0:
                    report(self._requests.count, self.tape.slices)
        except TapeEnd:
            pass
        except DiffersError as error:
            difference = str(error)
        return Replayed(self._requests.count, self.tape.slices, difference)

    def _run_slice(self, scheduler: Scheduler, grammar_of: Callable[[int], Grammar]) -> None:
        """Does the same as `Engine._step`, with the turn from the tape."""
        turn = self.tape.next_turn()
        if isinstance(turn, bytes):
            try:
                self._requests.apply(msgspec.msgpack.decode(turn, type=Turn), scheduler.add, grammar_of)
            except msgspec.DecodeError as error:
                raise RunnerError(f"unreadable: {error}") from None
        scheduler.compute_slice()
        _ = scheduler.idle  # as in `Engine._step`: this call may receive a mask
        self.turns.outbox.send()


def build_replayed(settings: Settings, model: OpenedModel, tokenizer: Tokenizer, world: TapedWorld) -> Parts:
    """Builds the engine of a replay on this thread, and warms it up."""
    opening: Future[Tokenizer] = Future()
    opening.set_result(tokenizer)
    parts = assemble(settings, model, opening, perf_counter(), lambda _: None, world)
    parts.warm_up()
    return parts


def replay_tape(
    reader: TapeReader, settings: Settings, model: OpenedModel, tokenizer: Tokenizer, report: Callable[[int, int], None]
) -> Replayed:
    """Loads the model, and replays a tape on this thread, which owns MLX from then on. Raises ModelError if the model
    cannot be loaded, and RunnerError if the tape cannot be read."""
    player = Player(reader.entries())
    taped = Replay(player, model.vocab_size or tokenizer.vocab_size)
    try:
        parts = build_replayed(settings, model, tokenizer, TapedWorld(player, taped.turns))
    except TapeEnd:
        return Replayed(0, 0, "")
    except DiffersError as error:
        return Replayed(0, 0, str(error))
    return taped.run(parts.scheduler, parts.formats.replayed, report)
