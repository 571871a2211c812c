"""Records an engine."""

from collections.abc import Callable
from pathlib import Path

from runner.engine.events import Outbox
from runner.engine.guide import Grammar
from runner.engine.ports import Tape, What
from runner.engine.request import Request
from runner.engine.world import Turns
from runner.logs import Log
from runner.model import OpenedModel
from runner.settings import Settings
from runner.tape.file import TapeFile, encode
from runner.tape.grammar import TapedGrammar
from runner.tape.header import check_recordable, header_of
from runner.tape.recorder import Recorder
from runner.tape.requests import Originals, TapedRequests
from runner.tape.taps import TapedOutbox, TapedWorld

log = Log(__name__)


class Recording(Turns):
    """What an engine that is recorded does beside its slices. Owner: the engine thread."""

    def __init__(
        self, recorder: Recorder, outbox: Outbox, wrap: Callable[[Grammar, Tape], Grammar] = TapedGrammar
    ) -> None:
        """`wrap` puts the states of a compiled grammar on the tape."""
        self.tape = recorder
        self.outbox = TapedOutbox(outbox, recorder)
        self._originals = Originals()
        self._requests = TapedRequests(self.outbox, recorder, wrap)

    def queue(self, add: Callable[[Request], None]) -> Callable[[Request], None]:  # noqa: ARG002 - `begin_slice` has it
        """Returns the function that keeps a request that has left the mailbox for the next slice."""
        return self._originals.add

    def begin_slice(self, add: Callable[[Request], None]) -> None:
        """Hands on what has happened outside since the last slice. `add` queues a request."""
        self.tape.on = True
        turn = self._originals.take_turn(self._requests, add)
        self.tape.same(What.TURN, None if turn is None else encode(turn))

    def end_slice(self, *, idle: bool) -> None:
        """Ends a slice, or the start. An `idle` engine may be ended at any moment: everything is written before."""
        self.tape.on = False
        if idle:
            self.tape.flush()


def start_recording(path: Path, settings: Settings, model: OpenedModel, outbox: Outbox) -> tuple[TapedWorld, Recording]:
    """Creates the file, and returns the world on it, and its turns. Raises UsageError if it cannot be written, or if
    these settings cannot be recorded."""
    check_recordable(settings, model)
    file = TapeFile(path, header_of(settings, model))
    log.info("recording", file=str(file.path), why="--record; prompts and answers are in the file")
    recorder = Recorder(file)
    return TapedWorld(recorder), Recording(recorder, outbox)
