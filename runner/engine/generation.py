"""A request that is being computed: its life from the first prefill chunk to the last token."""

from collections.abc import Callable
from enum import Enum, auto
from time import perf_counter_ns
from typing import cast

import mlx.core as mx

from protocol import DoneReason, Logprob, Metrics, TopLogprob
from runner.cache.interface import PrefixCache
from runner.engine.events import Event, Finished, Text
from runner.engine.request import Request
from runner.engine.text import Piece, TextStream
from runner.logs import Log
from runner.sampling.sampler import Sample, Sampler
from runner.tokenizer import Tokenizer

log = Log(__name__)
Forward = Callable[[mx.array, list[object]], mx.array]
"""Tokens [1, L] and the layers' caches to logits [1, L, V]."""
_CLEAR_TOKENS = 256  # mlx-lm's caches grow in steps of as many, each time into new buffers


class Phase(Enum):
    """Where in its life a generation is."""

    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Generation:
    """Advances one request slice by slice: a slice is one prefill chunk or one decode step.

    Owner: the engine thread. Lives from the moment the request leaves the queue until `close`, which must be called
    whatever happened: it is what keeps the cache and the layers in step.
    """

    def __init__(
        self,
        request: Request,
        forward: Forward,
        cache: PrefixCache,
        tokenizer: Tokenizer,
        chunk_tokens: int,
        context_length: int,
        salt: str = "",
    ) -> None:
        """`salt` names what changes the meaning of what the cache keeps: prompts of different salts share nothing."""
        self.request = request
        self.phase = Phase.PREFILL
        self._forward = forward
        self._tokenizer = tokenizer
        self._text: TextStream[Logprob] = TextStream(tokenizer, request.stops)
        self._context_length = context_length
        self._started_ns = perf_counter_ns()
        self._decode_started_ns = 0
        self._first_token_ns = 0
        self._ended_ns = 0
        self._count = 0  # tokens generated, the end-of-sequence token excluded
        self._dispatched = 0  # samples whose forward has been dispatched
        self._session = cache.begin(request.prompt, salt)
        self._plan = self._session.forward_plan(chunk_tokens)
        self._position = 0  # in session.remaining
        self._sampler: Sampler | None = None
        self._ahead: Sample | None = None  # dispatched, not yet read

    def advance(self) -> list[Event]:
        """Compute one slice and return what there is to tell."""
        if self.phase is Phase.PREFILL:
            count = next(self._plan, None)
            if count is not None:
                self._prefill(count)
                return []
            self._decode_started_ns = perf_counter_ns()
            self.phase = Phase.DECODE
        return self._decode()

    @property
    def done(self) -> bool:
        """Whether there is nothing left to compute."""
        return self.phase is Phase.DONE

    def close(self, failed: bool = False) -> None:
        """Give the cache back what was computed, or, after a fault, nothing. Later calls do nothing.

        Waits for the forward that is still on its way, so tell the client of the end first.
        """
        self._end()
        self._session.close(failed=failed)

    def report(self, outcome: str) -> None:
        """Write the request's line to the log."""
        session = self._session
        first = self._first_token_ns or self._ended_ns
        decode_s = max(1, self._ended_ns - first) / 1e9
        log.info(
            "completion",
            outcome=outcome,
            total=session.total,
            matched=session.matched,
            cached=session.cached,
            left=session.total - session.cached,
            miss=session.miss,
            generated=self._count,
            ttft_ms=round((first - self._started_ns) / 1e6, 1),
            tokens_per_s=round(max(0, self._count - 1) / decode_s, 1),
        )

    def metrics(self) -> Metrics:
        """The counters so far, in tokens and nanoseconds."""
        now = self._ended_ns or perf_counter_ns()
        decode_started = self._decode_started_ns or now
        return Metrics(
            prompt_eval_count=self._session.total,
            prompt_eval_cached_count=self._session.cached,
            prompt_eval_duration=decode_started - self._started_ns,
            eval_count=self._count,
            eval_duration=now - decode_started,
        )

    def _prefill(self, count: int) -> None:
        tokens = self._session.remaining[self._position : self._position + count]
        with self._session.forward(count):
            self._forward(mx.array([tokens]), self._session.layers)
        self._position += count
        mx.eval(self._session.state())
        mx.clear_cache()  # a chunk's intermediates have other sizes than those of the next forwards

    def _decode(self) -> list[Event]:
        """Read one token, after the forward of the next one is on its way."""
        current = self._ahead or self._dispatch(mx.array(self._session.remaining[-1:]))
        if self._dispatched < self.request.max_tokens:
            self._ahead = self._dispatch(current.token)
        token = cast("int", current.token.item())
        self._session.record(token)
        self._first_token_ns = self._first_token_ns or perf_counter_ns()
        if token in self._tokenizer.eos:
            return self._finish(DoneReason.STOP)
        self._count += 1
        if self._count % _CLEAR_TOKENS == 0:
            mx.clear_cache()  # the layers have outgrown their buffers, and nothing else is as large as those
        piece = self._text.push(token, self._entry(token, current))
        if self._text.stopped:
            return [*self._tell(piece), *self._finish(DoneReason.STOP)]
        if self._count == self.request.max_tokens:
            return [*self._tell(piece), *self._finish(DoneReason.LENGTH)]
        return self._tell(piece)

    def _dispatch(self, token: mx.array) -> Sample:
        """Start the forward over one token [1] and the sampling of the next."""
        with self._session.forward(1):
            logits = self._forward(token[None], self._session.layers)
        if self._sampler is None:
            self._sampler = Sampler(self.request.sampling, self.request.prompt, logits.shape[-1], self._context_length)
        sample = self._sampler(logits[:, -1, :])
        mx.async_eval(sample.arrays())
        self._dispatched += 1
        return sample

    def _finish(self, reason: DoneReason) -> list[Event]:
        rest = self._tell(self._text.finish())
        self._end()
        return [*rest, Finished(DoneReason.STOP if self._text.stopped else reason, self.metrics())]

    def _end(self) -> None:
        self.phase = Phase.DONE
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def _tell(self, piece: Piece[Logprob] | None) -> list[Event]:
        if piece is None:
            return []
        return [Text(piece.text, piece.entries, self.metrics() if self.request.metered else None)]

    def _entry(self, token: int, sample: Sample) -> Logprob | None:
        if sample.logprob is None:
            return None
        top: list[TopLogprob] = []
        if sample.top_ids is not None and sample.top_logprobs is not None:
            ids, logprobs = (
                cast("list[int]", sample.top_ids[0].tolist()),
                cast("list[float]", sample.top_logprobs[0].tolist()),
            )
            top = [TopLogprob(self._tokenizer.token_text(i), p) for i, p in zip(ids, logprobs, strict=True)]
        return Logprob(self._tokenizer.token_text(token), cast("float", sample.logprob.item()), top)
