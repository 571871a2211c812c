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
        self.done = False
        """Whether there is nothing left to compute."""
        self.sociable = True
        """Whether it may decode together with others."""
        self.began_again = False
        """Whether memory has run out for it once."""
        self._tokenizer = tokenizer
        self._text: Detokenizer[Logprob] = Detokenizer(tokenizer, request.stops)
        self._context_length = context_length
        self._started_ns = started_ns
        self._computed_ns = perf_counter_ns()  # from when on, which is later where another one had to be waited for
        self._decode_started_ns = 0
        self._first_token_ns = 0
        self._ended_ns = 0
        self._count = 0  # tokens generated, the end-of-sequence token excluded
        self._forced_count = 0  # of those, what the grammar left no choice about
        self._outcome = "done"
        self._sampling = request.sampling
        self._sampler: Sampler | None = None
        self._guide: Guide | None = None

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

    @property
    def constrained(self) -> bool:
        """Whether a grammar has a say."""
        return self._guide is not None

    def constrain(self) -> list[Event]:
        """Follow the grammar of the request, which is known, from here on. What the answer has to begin with becomes
        part of what is to prefill; returns what there is to tell of it."""
        if self._guide is not None or self.request.grammar is None:
            return []
        if self.request.grammar.cancelled() or self.request.grammar.exception() is not None:  # the client knows it
            self._outcome = "cancelled" if self.request.grammar.cancelled() else "refused"
            self._end()
            return []
        try:
            self._guide = self.request.grammar.result().guide()
            events = self._push(self._forced(self.request.max_tokens))
        except Exception as error:  # of this request alone
            return self.fail(error)
        self._forced_count = self._count
        return events

    def lead(self, choice: Choice) -> None:
        """Lead the grammar along its next token; `wait` until that is done."""
        if self._guide is not None and choice.token not in self._tokenizer.eos:
            self._guide.take(choice.token)

    def wait(self, patience_s: float) -> bool:
        """Wait so many seconds at most for the grammar, if there is one. Returns whether it can be asked."""
        return self._guide is None or self._guide.wait(patience_s)

    def follow(self, choice: Choice, *, alone: bool) -> Choice:
        """What to `take` of its next token, along which the grammar has been led: where it is `alone`, with the tokens
        behind it that the grammar leaves no choice about."""
        if self._guide is None or choice.token in self._tokenizer.eos:
            return choice
        most = min(self.request.max_tokens - self._count - 1, _JUMP_TOKENS)
        forced = self._forced(most) if alone else []
        if forced and self._sampler is not None:
            self._sampler.skip(forced)
        return choice._replace(follow=forced)

    def _forced(self, most: int) -> list[int]:
        """Nobody has to know the probabilities of what comes without a choice; if somebody wants to, it is drawn."""
        return self._guide.forced(most) if self._guide is not None and not self._sampling.logprobs else []

    def retrace(self) -> None:
        """Lead the grammar from its beginning along what was taken: it may be a token further."""
        if self._guide is not None:
            self._guide.restart(self.session.recorded[self.session.total :])

    def ends_with(self, choice: Choice) -> bool:
        """Whether nothing can come behind this choice, along which the grammar was led."""
        ended = choice.token in self._tokenizer.eos or (self._guide is not None and self._guide.over)
        return ended or self._count + 1 + len(choice.follow) >= self.request.max_tokens

    @property
    def mask(self) -> Mask | None:
        """Which tokens may come next; None: all, or none at all, as what takes the next one will find."""
        return None if self._guide is None or self._guide.over else self._guide.mask()

    # --- decode

    def start_decode(self) -> list[int]:
        """The prefill is over; returns the tokens that the first decode step takes."""
        self._decode_started_ns = self._decode_started_ns or perf_counter_ns()
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

    @property
    def wants_more(self) -> bool:
        """Whether, while a token of it is on its way, another one may follow."""
        return self._count + 1 < self.request.max_tokens

    def take(self, choice: Choice) -> list[Event]:
        """Its next token, and what there is to tell of it."""
        if self._guide is not None and self._guide.fault:
            return self.turn_away(self._guide.fault)
        try:
            return self._take(choice)
        except Exception as error:  # of this request alone
            return self.fail(error)

    def fail(self, error: Exception) -> list[Event]:
        """The request ends by this error, which is being handled; what there is to tell of it."""
        if isinstance(error, RequestError):  # nothing is wrong but the request
            return self.turn_away(str(error))
        log.exception("a request failed", request=self.request.number)
        self._outcome = "failed"
        self._end()
        return [Failed(told(error))]

    def turn_away(self, text: str) -> list[Event]:
        """The request cannot go on, as `text` says; what there is to tell of it."""
        log.warning("a request cannot go on", request=self.request.number, why=text)
        self._outcome = "failed"
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
            self._outcome = "cancelled"
            self._end()
        if self._guide is not None:
            self._guide.close()
        self.session.close(failed=self._outcome == "failed")

    @property
    def life(self) -> Lifecycle:
        """What has become of it so far."""
        return Lifecycle(
            self.request.arrived_ns,
            self._computed_ns,
            self._decode_started_ns,
            self._first_token_ns,
            self._ended_ns,
            self._count,
            self._forced_count,
            self._outcome,
        )

    def metrics(self) -> Metrics:
        """The counters so far, in tokens and nanoseconds."""
        now = self._ended_ns or perf_counter_ns()
        decode_started = self._decode_started_ns or now
        return Metrics(
            prompt_eval_count=self.session.total,
            prompt_eval_cached_count=self.session.cached,
            prompt_eval_duration=decode_started - self._started_ns,
            eval_count=self._count,
            eval_duration=now - decode_started,
        )

    def _take(self, choice: Choice) -> list[Event]:
        if choice.token in self._tokenizer.eos:
            self.session.record(choice.token)
            self._first_token_ns = self._first_token_ns or perf_counter_ns()
            return self._finish(DoneReason.STOP)
        before = self._count
        events = self._push([choice.token, *choice.follow], entry(choice, self._tokenizer))
        self._forced_count += self._count - before - 1
        return events

    def _push(self, tokens: Sequence[int], entry: Logprob | None = None) -> list[Event]:
        """The answer goes on with these tokens, of which the first one has this entry."""
        if tokens:
            self._first_token_ns = self._first_token_ns or perf_counter_ns()
        for token in tokens:
            self.session.record(token)  # all of them, wherever the text ends: the layers see them
        pieces = []
        cut = False
        for token in tokens:
            self._count += 1
            pieces.append(self._text.push(token, entry))
            entry = None
            cut = self._text.stopped or self._count == self.request.max_tokens
            if cut:
                break
        events = self._tell(joined(pieces))
        if self._guide is not None and self._guide.complete and len(pieces) == len(tokens):
            return [*events, *self._finish(DoneReason.STOP)]
        return [*events, *self._finish(DoneReason.LENGTH)] if cut else events

    def _finish(self, reason: DoneReason) -> list[Event]:
        rest = self._tell(self._text.finish())
        self._end()
        if self._text.stopped:
            reason = DoneReason.STOP
        self._outcome = "done" if reason is DoneReason.STOP else "length"
        return [*rest, Finished(reason, self.metrics())]

    def _end(self) -> None:
        self.done = True
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def _tell(self, piece: Piece[Logprob] | None) -> list[Event]:
        if piece is None:
            return []
        return [Text(piece.text, piece.entries, self.metrics() if self.request.metered else None)]
