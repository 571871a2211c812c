"""A model with one cache in front of it, served request by request as the engine does it."""

from time import perf_counter_ns
from typing import NamedTuple

import mlx.core as mx

from runner.cache import make_cache
from runner.cache.session import LiveSession
from runner.engine.batch import Batch
from runner.engine.events import Text
from runner.engine.generation import Generation
from runner.engine.request import Request
from runner.sampling import SamplingOptions
from runner.tokenizer import Tokenizer
from scripts.tools.bench.cache.agent_trace import FIRST_WORD, TURN_TOKENS, Ask
from scripts.tools.bench.cache.models import Subject

_CONTEXT = 1 << 20
_TEMPERATURE, _TOP_K = 0.8, 4  # answers vary with the seed, and rounding noise seldom changes a draw among four
_NEVER = -1e9


class Served(NamedTuple):
    """One request: tokens of the prompt, milliseconds, bytes that the cache holds.

    `matched` and `cached` are what the session said, `computed` is how many tokens of the prompt went through the
    model. `ttft_ms` lasts from the beginning of the session until the first token was read, None without one;
    `ms` until the session was closed.
    """

    total: int
    matched: int
    cached: int
    computed: int
    ttft_ms: float | None
    ms: float
    held_bytes: int
    peak_bytes: int
    answer: list[int]

    @property
    def lost(self) -> int:
        """Tokens before the point of divergence that had to be computed again."""
        return self.matched - self.cached


class Contender:
    """One cache over the layers of a model. Serves one request at a time."""

    def __init__(self, subject: Subject, kind: str, *, chunk: int, vocabulary: int, budget_bytes: int | None) -> None:
        self.kind = kind
        self.cache = make_cache(kind, subject.make_layers, budget_bytes=budget_bytes, turn_tokens=TURN_TOKENS)
        self._subject = subject
        self._chunk = chunk
        self._words_only = mx.where(mx.arange(vocabulary) < FIRST_WORD, _NEVER, 0.0)

    def serve(self, ask: Ask) -> Served:
        """Compute the answer to one request, or the part of its prefill after which it is cancelled."""
        forwarded, text, peak, ttft_ms = 0, "", 0, None

        def forward(tokens: mx.array, layers: list[object]) -> mx.array:
            nonlocal forwarded
            forwarded += tokens.shape[1]
            return self._subject.model(tokens, cache=layers) + self._words_only

        started = perf_counter_ns()
        session = self.cache.begin(ask.prompt)
        assert isinstance(session, LiveSession)
        generation, decoding = Generation(_request(ask), session, _Numerals(), _CONTEXT, started), False
        group = Batch(generation, forward)
        try:
            while not generation.done and not _is_gone(ask, generation, forwarded):
                if not decoding and generation.left:
                    generation.prefill(self._chunk, forward)
                    peak = max(peak, self.cache.nbytes)
                    continue
                decoding = True
                for event in group.take(group.step())[0][1]:
                    if isinstance(event, Text):
                        ttft_ms = ttft_ms or (perf_counter_ns() - started) / 1e6
                        text += event.text
            peak = max(peak, self.cache.nbytes)
        except Exception as error:
            generation.fail(error)
            raise
        finally:
            generation.close()
        ms, held = (perf_counter_ns() - started) / 1e6, self.cache.nbytes
        return Served(
            total=session.total,
            matched=session.matched,
            cached=session.cached,
            computed=min(forwarded, len(session.remaining)),
            ttft_ms=ttft_ms,
            ms=ms,
            held_bytes=held,
            peak_bytes=max(peak, held),
            answer=[int(word) for word in text.split()],
        )


class _Numerals(Tokenizer):
    """Every token is its number in digits, so that the text of an answer tells its tokens."""

    def __init__(self) -> None:
        self.eos = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


def _request(ask: Ask) -> Request:
    sampling = SamplingOptions(temperature=_TEMPERATURE, top_k=_TOP_K, seed=ask.seed)
    return Request(prompt=ask.prompt, max_tokens=ask.answer_tokens, sampling=sampling, stops=None, metered=False)


def _is_gone(ask: Ask, generation: Generation, forwarded: int) -> bool:
    """Returns True if the client has left by now; the engine looks between two slices."""
    if ask.cancel is None:
        return False
    return forwarded >= ask.cancel * (len(generation.session.remaining) - 1)
