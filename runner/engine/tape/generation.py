"""A generation on a tape."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from protocol import Logprob
from runner.cache.session import LiveSession
from runner.engine.events import Event
from runner.engine.generation import Forward, Generation
from runner.engine.request import Request
from runner.engine.tape.interface import Tape, What
from runner.engine.tape.taps import Faults, TapedDrafter
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.drafter import Drafter
    from runner.engine.pictures.progress import PictureProgress


class TapedGeneration(Generation):
    """A generation that notes its tokens and its end. Owner: the engine thread."""

    def __init__(
        self,
        tape: Tape,
        request: Request,
        session: LiveSession,
        tokenizer: Tokenizer,
        context_length: int,
        started_ns: int,
        pictures: "PictureProgress | None",
        drafter: "Drafter | None",
    ) -> None:
        taped = None if drafter is None else TapedDrafter(drafter, tape)
        super().__init__(request, session, tokenizer, context_length, started_ns, pictures, taped)
        self._tape = tape
        self._ended = False

    def prefill(self, most: int, forward: Forward) -> int:
        with Faults(self._tape):
            return super().prefill(most, forward)

    def push(self, tokens: Sequence[int], entry: Logprob | None = None, *, completes: bool = False) -> list[Event]:
        if tokens:
            self._tape.same(What.TOKENS, [self.request.number, *tokens])
        return super().push(tokens, entry, completes=completes)

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        super().close()
        life, session = self.life, self.session
        counts = [session.total, session.matched, session.cached, session.evicted_bytes]
        drafts = [life.generated, life.forced, life.known, life.drafted, life.accepted]
        self._tape.same(What.ENDED, [self.request.number, life.outcome, *counts, *drafts])
