"""One budget for everything that MLX holds: weights, what the cache keeps, what runs, and what a slice takes meanwhile.

    budget  =  weights  +  room
    room    =  cache (keys and values of those that run, and snapshots)
             + what else is held (samplers, forwards on their way, grammars)
             + headroom (the next slice of a prompt, the growth of answers, MLX's own reuse)

The cache may hold what the headroom leaves, and no more than `--cache-memory`: as contexts grow the headroom does, and
what nobody uses goes. Where even that is not enough, a slice is cut short, the next request waits, and what can never
fit is refused, always with the numbers.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from runner.cache import Cache, CacheBudget
from runner.engine.memory.estimate import WorkspaceEstimate
from runner.engine.policy import LEAST_TOKENS
from runner.logs import Log
from runner.sizes import shown

if TYPE_CHECKING:
    from runner.engine.batch import Results
    from runner.engine.generation import Forward, Generation

log = Log(__name__)
_GROWTH_TOKENS = 256  # layers grow by so many tokens at a time
_FADE_STEPS = 1024
_SHARE = 4  # of the room: what a slice may take for speed alone
_REUSE = 16  # of the room: what MLX may keep of freed buffers for the next ones
_ADVICE = "Shorten the prompt, let keys and values take less (--kv-bits 8), or give the runner more (--memory)"


class Meter(Protocol):
    """What MLX says about its memory, in bytes."""

    def active(self) -> int:
        """In use now."""
        ...

    def restart(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """The most that was in use since then."""
        ...

    def clear(self) -> None:
        """Give back what is kept for reuse."""


class MemoryBudget:
    """Decides what fits. Owner: the engine thread. Asks MLX for numbers through a meter; all else is arithmetic."""

    def __init__(
        self,
        meter: Meter,
        budget_bytes: int | None,
        chunk_tokens: int,
        reuse_bytes: int = 0,
        grammar_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Made when the weights are loaded and nothing else is. `budget_bytes` None bounds nothing; `chunk_tokens` is
        the longest slice of a prompt, `reuse_bytes` what MLX may keep for reuse whatever else is needed, and
        `grammar_bytes` what grammars take of the same memory."""
        self.budget_bytes = budget_bytes
        self.weights_bytes = meter.active()
        self.workspace = WorkspaceEstimate()
        self._meter = meter
        self._chunk_tokens = chunk_tokens
        self._reuse_bytes = reuse_bytes
        self._grammar_bytes = grammar_bytes
        self._step_bytes = 0  # what steps of decoding took, beside what they left
        self._peak_bytes = self._mark = 0
        self._rows = self._reached = 0

    @property
    def room_bytes(self) -> int:
        """What the budget leaves beside the weights."""
        return max(0, (self.budget_bytes or 0) - self.weights_bytes)

    # --- who may begin, and with what

    def refusal(self, cache: CacheBudget, tokens: int) -> str:
        """Why a context of so many tokens could not be computed even alone, or nothing."""
        if self.budget_bytes is None:
            return ""
        kept = cache.session_bytes(tokens)
        beside = self._reuse_bytes + self.workspace.surely(LEAST_TOKENS, tokens)
        if kept + beside <= self.room_bytes:
            return ""
        return f"there is no room for so long a context: {self._numbers(f'{tokens} tokens', kept, beside)}. {_ADVICE}"

    def admits(self, cache: CacheBudget, tokens: int) -> bool:
        """Whether a request of so many tokens fits beside those that run, as of the last `fit`."""
        if not cache.admits(tokens):
            return False
        if self.budget_bytes is None or not self._rows:
            return True
        computing = self.workspace.surely(LEAST_TOKENS, tokens) - self.workspace.of(LEAST_TOKENS, self._reached)
        return cache.allows(cache.session_bytes(tokens + _GROWTH_TOKENS) + self._growth(cache, 1) + max(0, computing))

    def fit(self, cache: Cache, running: "Sequence[Generation]") -> "Results":
        """Makes what is held fit beside what those need that run. Where they do not fit even when nothing else is kept,
        one of them is turned away: who would not fit alone, else the youngest."""
        if self.budget_bytes is None:
            return []
        self._rows = len(running)
        self._reached = max((each.session.position for each in running), default=0)
        others = self._others(cache)
        cache.bound(max(0, self.room_bytes - others - self._headroom(cache, self._rows, self._reached)))
        for generation in running:
            if text := self.refusal(cache, len(generation.session.recorded)):
                return [(generation, generation.turn_away(text))]
        kept, beside = cache.nbytes, others + self._fixed() + self.workspace.of(LEAST_TOKENS, self._reached)
        lacking = kept + beside - self.room_bytes
        if not running or lacking <= 0:
            return []
        if cache.describe().counts.paged_bytes >= lacking:  # of those that run: nobody else has any left
            log.warning("what is kept of prompts that are being computed is given up", lacking_bytes=lacking)
            cache.detach()
            return []
        youngest = max(running, key=lambda generation: generation.request.number)
        numbers = self._numbers("what runs", kept, beside)
        text = f"there is no room to go on: {numbers}. {_ADVICE}, or run fewer at once (--parallel)"
        return [(youngest, youngest.turn_away(text))]

    # --- what slices take

    def prefill(self, cache: CacheBudget, generation: "Generation", most: int, forward: "Forward") -> int:
        """Computes the next slice of a prompt, of no more tokens than there is room for. Returns how many it was."""

        tokens = self._slice_tokens(cache, most, generation.session.position)
        computed = generation.prefill(tokens, self.watched(forward))
        self.workspace.saw(computed, generation.session.position, self._taken())
        return computed

    def watched(self, forward: "Forward") -> "Forward":
        """The forward, from each call of which on is watched what is computed. Costs less than a microsecond."""

        def watched(tokens: mx.array, layers: list[object]) -> mx.array:
            self._look()
            self._mark = self._meter.active()  # not before: the cache may have copied things
            return forward(tokens, layers)

        return watched

    def stepped(self) -> None:
        """A step of decoding, whose forward is watched, is over. The most that one took is forgotten slowly."""
        self._step_bytes = max(self._step_bytes - self._step_bytes // _FADE_STEPS, self._taken())

    def peak(self) -> int:
        """The most that was ever in use, in bytes."""
        self._peak_bytes = max(self._peak_bytes, self._meter.peak())
        return self._peak_bytes

    def _slice_tokens(self, cache: CacheBudget, most: int, context: int) -> int:
        if self.budget_bytes is None:
            return most
        free = self.room_bytes - cache.nbytes - self._others(cache) - self._fixed() - self._growth(cache, self._rows)
        return min(most, self.workspace.tokens_in(max(0, free), context + most))

    def _taken(self) -> int:
        """Since it is watched: the most that was in use at once, beside what was before or is now."""
        return max(0, self._look() - max(self._mark, self._meter.active()))

    def free(self, cache: CacheBudget) -> None:
        """Gives up everything that nobody uses: memory has run out."""
        cache.evict()
        self._meter.clear()

    def _look(self) -> int:
        """The peak since the last look."""
        peak = self._meter.peak()
        self._meter.restart()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    # --- arithmetic

    def _others(self, cache: CacheBudget) -> int:
        """Bytes held that are neither weights nor the cache's."""
        return max(0, self._meter.active() - self.weights_bytes - cache.nbytes) + self._grammar_bytes()

    def _fixed(self) -> int:
        return self._reuse_bytes + self._step_bytes

    def _growth(self, cache: CacheBudget, rows: int) -> int:
        """What so many answers may grow by at once."""
        return rows * (cache.session_bytes(_GROWTH_TOKENS) - cache.session_bytes(0))

    def _headroom(self, cache: CacheBudget, rows: int, context: int) -> int:
        """What is left free: for a whole chunk of a prompt if that is no large part of the room, else for less."""
        chunk = min(self.workspace.of(self._chunk_tokens, context), self.room_bytes // _SHARE)
        least = self.workspace.of(LEAST_TOKENS, context)
        return self._fixed() + self._growth(cache, rows) + max(chunk, least)

    def _numbers(self, what: str, kept: int, beside: int) -> str:
        return (
            f"the keys and values of {what} take about {shown(kept)}, computing them {shown(beside)} more; the budget"
            f" is {shown(self.budget_bytes or 0)}, of which the model leaves {shown(self.room_bytes)}"
        )


class MLXMeter:
    """MLX's own counters; one for the process, as there is one MLX."""

    active = staticmethod(mx.get_active_memory)
    restart = staticmethod(mx.reset_peak_memory)
    peak = staticmethod(mx.get_peak_memory)
    clear = staticmethod(mx.clear_cache)


def set_limits(budget_bytes: int, *, on_cpu: bool) -> int:
    """Tells MLX, when the weights are loaded. Returns what it may keep for reuse whatever else is needed, in bytes.

    GPUs give up what is kept for reuse before they go beyond the limit; CPUs do not look.
    """
    mx.set_memory_limit(budget_bytes)
    reuse_bytes = max(0, budget_bytes - mx.get_active_memory()) // _REUSE
    before = mx.set_cache_limit(reuse_bytes)
    mx.set_cache_limit(min(before, reuse_bytes))
    mx.clear_cache()
    return min(before, reuse_bytes) if on_cpu else 0
