"""A request that is being computed: its life from the first prefill chunk to the last token."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

import mlx.core as mx

from protocol import DoneReason, Logprob, Metrics
from runner.cache.session import LiveSession
from runner.engine.detokenizer import Detokenizer, Piece, joined
from runner.engine.events import Event, Failed, Finished, Text
from runner.engine.lifecycle import Lifecycle
from runner.engine.logprobs import entry
from runner.engine.request import Request
from runner.engine.trace import TRACE
from runner.errors import RequestError
from runner.logs import Log, told
from runner.sampling.mask import Mask
from runner.sampling.sample import Choice
from runner.sampling.sampler import Sampler
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.grammar import Guide

log = Log(__name__)
_JUMP_TOKENS = 64  # the model computes the logits of all of them
Forward = Callable[[mx.array, list[object]], mx.array]
"""Tokens [B, L] and the layers' caches to logits [B, L, V]."""


class Generation:
    """One request: reads its prompt slice by slice, then takes one token after the other from whoever decodes it.

    Owner: the engine thread. Lives from the moment the request leaves the queue until `close`, which must be called
    whatever happened: it is what keeps the cache and the layers in step.
    """

    def __init__(
        self, request: Request, session: LiveSession, tokenizer: Tokenizer, context_length: int, started_ns: int
    ) -> None:
        """`started_ns` is when the request left the queue."""
        self.request = request
        self.session = session
        self.life = Lifecycle(request.arrived_ns, started_ns, computed_ns=perf_counter_ns())
        self.room = request.max_tokens
        """How many tokens may still be generated."""
        self.done = False
        """Whether there is nothing left to compute."""
        self.sociable = True
        """Whether it may decode together with others."""
        self.began_again = False
        """Whether memory has run out for it once."""
        self.guide: Guide | None = None
        """What leads the answer through the grammar of the request, if there is one."""
        self._tokenizer = tokenizer
        self._text: Detokenizer[Logprob] = Detokenizer(tokenizer, request.stops)
        self._context_length = context_length
        self._sampling = request.sampling
        self._sampler: Sampler | None = None

    @property
    def dropped(self) -> bool:
        """Whether it is to be dropped wherever it is."""
        return self.done or self.request.cancelled

    @property
    def left(self) -> int:
        """Tokens to prefill before the first decode step."""
        return max(0, len(self.session.recorded) - 1 - self.session.position)

    def prefill(self, most: int, forward: Forward) -> int:
        """Compute the next slice of the prompt, at most so many tokens; returns how many it was."""
        session = self.session
        count = session.next_forward(most)
        at = session.position
        with session.forward(count):
            forward(mx.array([session.recorded[at : at + count]]), session.layers)
        TRACE.lap("forward")
        mx.eval(session.state())
        TRACE.lap("wait")
        mx.clear_cache()  # a chunk's intermediates have other sizes than those of the next forwards
        return count

    # --- the grammar

    @property
    def compiled(self) -> bool:
        """Whether its grammar is known, if it has one."""
        return self.request.grammar is None or self.request.grammar.done()

    def constrain(self) -> list[Event]:
        """Follow the grammar of the request, which is known, from here on. What the answer has to begin with becomes
        part of what is to prefill; returns what there is to tell of it."""
        if self.guide is not None or self.request.grammar is None:
            return []
        if self.request.grammar.cancelled() or self.request.grammar.exception() is not None:  # the client knows it
            self.life.outcome = "cancelled" if self.request.grammar.cancelled() else "refused"
            self._end()
            return []
        try:
            self.guide = self.request.grammar.result().guide()
            events = self._push(self._forced(self.room))
        except Exception as error:  # of this request alone
            return self.fail(error)
        self.life.forced = self.life.generated
        return events

    def lead(self, choice: Choice) -> None:
        """Lead the grammar along its next token; `wait` until that is done."""
        if self.guide is not None and choice.token not in self._tokenizer.eos:
            self.guide.take(choice.token)

    def wait(self, patience_s: float) -> bool:
        """Wait so many seconds at most for the grammar, if there is one. Returns whether it can be asked."""
        return self.guide is None or self.guide.wait(patience_s)

    def follow(self, choice: Choice, *, alone: bool) -> Choice:
        """What to `take` of its next token, along which the grammar has been led: where it is `alone`, with the tokens
        behind it that the grammar leaves no choice about."""
        if self.guide is None or choice.token in self._tokenizer.eos:
            return choice
        most = min(self.room - 1, _JUMP_TOKENS)
        forced = self._forced(most) if alone else []
        if forced and self._sampler is not None:
            self._sampler.skip(forced)
        return choice._replace(follow=forced)

    def _forced(self, most: int) -> list[int]:
        """Nobody has to know the probabilities of what comes without a choice; if somebody wants to, it is drawn."""
        return self.guide.forced(most) if self.guide is not None and not self._sampling.logprobs else []

    def retrace(self) -> None:
        """Lead the grammar from its beginning along what was taken: it may be a token further."""
        if self.guide is not None:
            self.guide.restart(self.session.recorded[self.session.total :])

    def ends_with(self, choice: Choice) -> bool:
        """Whether nothing can come behind this choice, along which the grammar was led."""
        ended = choice.token in self._tokenizer.eos or (self.guide is not None and self.guide.over)
        return ended or 1 + len(choice.follow) >= self.room

    @property
    def mask(self) -> Mask | None:
        """Which tokens may come next; None: all, or none at all, as what takes the next one will find."""
        return None if self.guide is None or self.guide.over else self.guide.mask()

    # --- decode

    def start_decode(self) -> list[int]:
        """The prefill is over; returns the tokens that the first decode step takes."""
        self.life.decoded_ns = self.life.decoded_ns or perf_counter_ns()
        return self.session.recorded[self.session.position :]

    def set_back(self) -> None:
        """Its layers are behind what is recorded: prefill again up to there, and decode alone from then on."""
        self.sociable = False
        self.retrace()
        if self._sampler is not None:
            self._sampling, self._sampler = self._sampler.options, None

    def sampler(self, vocab_size: int) -> Sampler:
        """What draws its tokens, from where the last one stopped."""
        if self._sampler is None:
            drawn = self.session.recorded[self.session.total :]
            self._sampler = Sampler(self._sampling, self.request.prompt, vocab_size, self._context_length, drawn)
        return self._sampler

    def take(self, choice: Choice) -> list[Event]:
        """Its next token, and what there is to tell of it."""
        if self.guide is not None and self.guide.fault:
            return self.turn_away(self.guide.fault)
        try:
            return self._take(choice)
        except Exception as error:  # of this request alone
            return self.fail(error)

    def fail(self, error: Exception) -> list[Event]:
        """The request ends by this error, which is being handled; what there is to tell of it."""
        if isinstance(error, RequestError):  # nothing is wrong but the request
            return self.turn_away(str(error))
        log.exception("a request failed", request=self.request.number)
        self.life.outcome = "failed"
        self._end()
        return [Failed(told(error))]

    def turn_away(self, text: str) -> list[Event]:
        """The request cannot go on, as `text` says; what there is to tell of it."""
        log.warning("a request cannot go on", request=self.request.number, why=text)
        self.life.outcome = "failed"
        self._end()
        return [Failed(text)]

    def begin_again(self, session: LiveSession) -> None:
        """In place of its session, which failed and is closed, this one: of its prompt, and nothing computed yet but
        what was kept. What was generated so far counts."""
        session.recorded += self.session.recorded[self.session.total :]
        self.session = session
        self.began_again = True
        self.set_back()

    def close(self) -> None:
        """Give the cache back what was computed, or, after a fault, nothing. Later calls do nothing.

        Waits for the forward that is still on its way, so tell the client of the end first.
        """
        if not self.done:
            self.life.outcome = "cancelled"
            self._end()
        if self.guide is not None:
            self.guide.close()
        self.session.close(failed=self.life.outcome == "failed")

    def metrics(self) -> Metrics:
        """The counters so far, in tokens and nanoseconds."""
        return self.life.metrics(self.session.total, self.session.cached)

    def _take(self, choice: Choice) -> list[Event]:
        if choice.token in self._tokenizer.eos:
            self.session.record(choice.token)
            self.life.first_token_ns = self.life.first_token_ns or perf_counter_ns()
            return self._finish(DoneReason.STOP)
        before = self.life.generated
        logprob = None if choice.logprob is None else entry(choice, choice.logprob, self._tokenizer)
        events = self._push([choice.token, *choice.follow], logprob)
        self.life.forced += self.life.generated - before - 1
        return events

    def _push(self, tokens: Sequence[int], entry: Logprob | None = None) -> list[Event]:
        """The answer goes on with these tokens, of which the first one has this entry."""
        if tokens:
            self.life.first_token_ns = self.life.first_token_ns or perf_counter_ns()
        for token in tokens:
            self.session.record(token)  # all of them, wherever the text ends: the layers see them
        pieces, before = [], self.life.generated
        cut = False
        for token in tokens:
            self.life.generated += 1
            self.room -= 1
            if piece := self._text.push(token, entry):
                pieces.append(piece)
            entry = None
            cut = self._text.stopped or not self.room
            if cut:
                break
        events = self._tell(joined(pieces)) if pieces else []
        if self.guide is not None and self.guide.complete and self.life.generated - before == len(tokens):
            return [*events, *self._finish(DoneReason.STOP)]
        return [*events, *self._finish(DoneReason.LENGTH)] if cut else events

    def _finish(self, reason: DoneReason) -> list[Event]:
        rest = self._tell(self._text.finish())
        self._end()
        if self._text.stopped:
            reason = DoneReason.STOP
        self.life.outcome = "done" if reason is DoneReason.STOP else "length"
        return [*rest, Finished(reason, self.metrics())]

    def _end(self) -> None:
        self.done = True
        self.life.ended_ns = self.life.ended_ns or perf_counter_ns()

    def _tell(self, piece: Piece[Logprob] | None) -> list[Event]:
        if piece is None:
            return []
        return [Text(piece.text, piece.entries, self.metrics() if self.request.metered else None)]
