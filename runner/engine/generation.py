"""A request that is being computed: its life from the first prefill chunk to the last token."""

from collections.abc import Callable
from time import perf_counter_ns

import mlx.core as mx

from protocol import DoneReason, Logprob, Metrics, TopLogprob
from runner.cache.session import LiveSession
from runner.engine.events import Event, Failed, Finished, Text
from runner.engine.request import Request
from runner.engine.text import Piece, TextStream
from runner.engine.trace import TRACE
from runner.logs import Log, told
from runner.sampling.sample import Choice
from runner.sampling.sampler import Sampler
from runner.tokenizer import Tokenizer

log = Log(__name__)
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
        self._tokenizer = tokenizer
        self._text: TextStream[Logprob] = TextStream(tokenizer, request.stops)
        self._context_length = context_length
        self._started_ns = started_ns
        self._computed_ns = perf_counter_ns()  # from when on, which is later where another one had to be waited for
        self._decode_started_ns = 0
        self._first_token_ns = 0
        self._ended_ns = 0
        self._count = 0  # tokens generated, the end-of-sequence token excluded
        self._outcome = "done"
        self._sampling = request.sampling
        self._sampler: Sampler | None = None

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

    def start_decode(self) -> int:
        """The prefill is over; returns the token that the first decode step takes."""
        self._decode_started_ns = self._decode_started_ns or perf_counter_ns()
        return self.session.recorded[-1]

    def set_back(self) -> None:
        """Its layers are behind what is recorded: prefill again up to there, and decode alone from then on."""
        self.sociable = False
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
        try:
            return self._take(choice)
        except Exception as error:  # of this request alone
            return self.fail(error)

    def fail(self, error: Exception) -> list[Event]:
        """The request ends by this error, which is being handled; what there is to tell of it."""
        log.exception("a request failed", request=self.request.number)
        self._outcome = "failed"
        self._end()
        return [Failed(told(error))]

    def close(self) -> None:
        """Give the cache back what was computed, or, after a fault, nothing. Later calls do nothing.

        Waits for the forward that is still on its way, so tell the client of the end first.
        """
        if not self.done:
            self._outcome = "cancelled"
            self._end()
        self.session.close(failed=self._outcome == "failed")

    def report(self) -> None:
        """Write the request's line to the log."""
        session = self.session
        first = self._first_token_ns or self._ended_ns
        decode_s = max(1, self._ended_ns - first) / 1e9
        log.info(
            "completion",
            request=self.request.number,
            outcome=self._outcome,
            total=session.total,
            matched=session.matched,
            cached=session.cached,
            left=session.total - session.cached,
            miss=session.miss,
            generated=self._count,
            waited_ms=round((self._computed_ns - self.request.arrived_ns) / 1e6, 1),
            ttft_ms=round((first - self.request.arrived_ns) / 1e6, 1),
            tokens_per_s=round(max(0, self._count - 1) / decode_s, 1),
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
        self.session.record(choice.token)
        self._first_token_ns = self._first_token_ns or perf_counter_ns()
        if choice.token in self._tokenizer.eos:
            return self._finish(DoneReason.STOP)
        self._count += 1
        piece = self._text.push(choice.token, self._entry(choice))
        if self._text.stopped:
            return [*self._tell(piece), *self._finish(DoneReason.STOP)]
        if self._count == self.request.max_tokens:
            return [*self._tell(piece), *self._finish(DoneReason.LENGTH)]
        return self._tell(piece)

    def _finish(self, reason: DoneReason) -> list[Event]:
        rest = self._tell(self._text.finish())
        self._end()
        return [*rest, Finished(DoneReason.STOP if self._text.stopped else reason, self.metrics())]

    def _end(self) -> None:
        self.done = True
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def _tell(self, piece: Piece[Logprob] | None) -> list[Event]:
        if piece is None:
            return []
        return [Text(piece.text, piece.entries, self.metrics() if self.request.metered else None)]

    def _entry(self, choice: Choice) -> Logprob | None:
        if choice.logprob is None:
            return None
        top = [TopLogprob(self._tokenizer.token_text(token), logprob) for token, logprob in choice.top]
        return Logprob(self._tokenizer.token_text(choice.token), choice.logprob, top)
