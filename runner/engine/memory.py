"""One budget for all memory that MLX holds: the weights, the cache, the running requests, and the workspace of a slice.

    budget  =  weights  +  room
    room    =  cache (keys and values of running requests, and snapshots)
             + other memory (samplers, dispatched forwards, grammars)
             + headroom (the next slice of a prompt, the growth of answers, MLX's own reuse)

The cache may hold the room without the headroom, but at most `--cache-memory`. As contexts grow, the headroom grows,
and unused cache entries are evicted. If that is not enough, slices become shorter, then new requests wait. A request
that can never fit is refused. The text of every refusal names the bytes needed and the bytes available.
"""

from collections.abc import Callable, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from runner.cache import PrefixCache
from runner.errors import RequestError
from runner.logs import Log
from runner.settings import LEAST_SLICE_TOKENS
from runner.sizes import sized

if TYPE_CHECKING:
    from runner.engine.generation import Forward, Generation

log = Log(__name__)

_FIRST_TOKEN_BYTES = 1 << 20  # of the very first slice: most models need less for a token
_GROWTH_TOKENS = 256  # layers grow by this many tokens at a time
_ROUND_ROWS = 8  # the rows of a round of drafts on a CPU
_FADE_STEPS = 1024
_SHARE = 4  # a slice may take a fourth of the room for speed alone
_REUSE = 16  # MLX may keep a sixteenth of the room in freed buffers, for reuse
_ADVICE = "Shorten the prompt, let keys and values take less (--kv-bits 8), or give the runner more (--memory)"


class _Sample(NamedTuple):
    """The maxima of context length and of bytes per token, over slices whose contexts were about equally long."""

    context: int
    token_bytes: float


class WorkspaceEstimate:
    """Estimates the memory that a slice of a prompt takes while it is computed, without the memory that it leaves in
    the cache. The estimate is the most that a token took so far, by the length of the context before it. Owner: the
    engine thread.

    A token's own activations cost the same in every context; its attention grows in proportion to the context. So the
    cost of a token never falls as the context grows, and rises along a line. Lengths between two powers of two share
    one sample.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def learn(self, tokens: int, context: int, nbytes: int) -> None:
        """Learns from a slice of `tokens` tokens, which took `nbytes` and left a context of `context` tokens."""
        token_bytes = nbytes / max(tokens, LEAST_SLICE_TOKENS)
        before = self._samples.get(context.bit_length(), _Sample(0, 0.0))
        self._samples[context.bit_length()] = _Sample(
            max(before.context, context), max(before.token_bytes, token_bytes)
        )

    def likely_bytes(self, tokens: int, context: int) -> int:
        """Returns the bytes that a slice of `tokens` will probably take in `context`; 0 before the first slice."""
        return ceil(max(tokens, LEAST_SLICE_TOKENS) * self._token_bytes(context))

    def certain_bytes(self, tokens: int, context: int) -> int:
        """Returns the least bytes that a slice of `tokens` takes, as learned in contexts up to `context`."""
        known = [each.token_bytes for each in self._samples.values() if each.context <= context]
        return ceil(max(tokens, LEAST_SLICE_TOKENS) * max(known, default=0.0))

    def tokens_in(self, nbytes: int, context: int) -> int:
        """Returns the number of tokens in a slice that takes `nbytes`: at least LEAST_SLICE_TOKENS."""
        token_bytes = max(1.0, self._token_bytes(context)) if self._samples else _FIRST_TOKEN_BYTES
        return max(LEAST_SLICE_TOKENS, floor(nbytes / token_bytes))

    def _token_bytes(self, context: int) -> float:
        samples = sorted(self._samples.values())
        shorter = [each for each in samples if each.context <= context]
        least = max((each.token_bytes for each in shorter), default=0.0)
        if shorter and shorter[-1].context == context:
            return least
        if len(shorter) < len(samples):
            return max(least, samples[len(shorter)].token_bytes)
        if not shorter:
            return 0.0
        first, last = shorter[0], shorter[-1]
        if first is last:
            return last.token_bytes * context / last.context
        slope = (last.token_bytes - first.token_bytes) / (last.context - first.context)
        return max(least, last.token_bytes + max(0.0, slope) * (context - last.context))


class Meter:
    """The memory of MLX by its own account, in bytes. A process has one account, as it has one MLX."""

    active = staticmethod(mx.get_active_memory)
    """Returns the bytes in use."""
    restart = staticmethod(mx.reset_peak_memory)
    """Resets the peak that `peak` returns."""
    peak = staticmethod(mx.get_peak_memory)
    """Returns the most bytes that were in use since the last `restart`."""
    clear = staticmethod(mx.clear_cache)
    """Frees the buffers that are kept for reuse."""

    def settle(self) -> None:
        """Waits until all dispatched arrays are computed and their buffers are released."""
        mx.synchronize()


class MemoryBudget:
    """Decides which requests and slices fit into memory, from a meter's numbers alone. Owner: the engine thread."""

    def __init__(
        self,
        meter: Meter,
        budget_bytes: int | None,
        chunk_tokens: int,
        reuse_bytes: int = 0,
        grammar_bytes: Callable[[], int] = lambda: 0,
        drop_unused: Callable[[], None] = lambda: None,
        draft_bytes: int = 0,
        one_grammar_bytes: int = 0,
    ) -> None:
        """Made after the weights are loaded and before anything else is. A `budget_bytes` of None sets no limit.
        `chunk_tokens` is the longest slice of a prompt; `reuse_bytes` are the bytes that MLX always keeps for reuse;
        `grammar_bytes` returns the bytes that other processes take from the budget, such as grammars; `drop_unused`
        frees memory outside the cache that no request needs now. A model that drafts may hold `draft_bytes` beside its
        weights. A grammar is likely to take `one_grammar_bytes` once it is compiled."""
        # Set for good.
        self.budget_bytes = budget_bytes
        self.weights_bytes = meter.active()
        self.one_grammar_bytes = one_grammar_bytes
        self._meter = meter
        self._chunk_tokens = chunk_tokens
        self._reuse_bytes = reuse_bytes
        self._grammar_bytes = grammar_bytes
        self._drop_unused = drop_unused
        self._draft_bytes = draft_bytes
        # Learned from past slices.
        self.workspace = WorkspaceEstimate()
        self._step_bytes = 0  # the most that a decode step took, without what it left in the cache
        self._peak_bytes = 0
        self._measured_for = -1  # the last request for which slices were measured again
        # Set by the last `fit`.
        self._running = 0
        self._longest = 0  # the tokens of the longest context
        self._spare_bytes = 0  # the part of the room that the cache can never use
        # Set by the present slice.
        self._start_bytes = 0

    @property
    def room_bytes(self) -> int:
        """The bytes of the budget that the weights leave free."""
        return max(0, (self.budget_bytes or 0) - self.weights_bytes)

    # --- which requests fit

    def refusal(self, cache: PrefixCache, tokens: int) -> str:
        """Returns the reason why a context of `tokens` tokens does not fit even alone. Empty if it fits."""
        if self.budget_bytes is None:
            return ""
        kept = cache.session_bytes(tokens)
        beside = self._reuse_bytes + self.workspace.certain_bytes(LEAST_SLICE_TOKENS, tokens)
        if kept + beside <= self.room_bytes:
            return ""
        return f"there is no room for so long a context: {self._numbers(f'{tokens} tokens', kept, beside)}. {_ADVICE}"

    def admits(self, cache: PrefixCache, tokens: int, *, grammar: bool = False) -> bool:
        """Returns True if a request of `tokens` tokens fits beside the requests that ran at the last `fit`. `grammar`
        tells whether the request has a grammar."""
        if not cache.admits(tokens):
            return False
        if self.budget_bytes is None or not self._running:
            return True
        longer = self.workspace.certain_bytes(LEAST_SLICE_TOKENS, tokens)
        computing = longer - self.workspace.likely_bytes(LEAST_SLICE_TOKENS, self._longest)
        needed = cache.session_bytes(tokens + _GROWTH_TOKENS) + self._growth(cache, 1) + max(0, computing)
        return cache.allows(needed + self.one_grammar_bytes * grammar)

    def fit(self, cache: PrefixCache, running: "Sequence[Generation]") -> "tuple[Generation, str] | None":
        """Limits the cache to the memory that the `running` requests leave. Returns None if all of them can continue.
        Else returns a request that must end, and the reason: one that does not fit even alone, or the youngest. Call
        again when it has ended."""
        if self.budget_bytes is None:
            return None
        self._running = len(running)
        self._longest = max((each.session.position for each in running), default=0)
        others = self._others(cache)
        compiling = self.one_grammar_bytes * sum(not each.grammar.compiled for each in running)
        headroom = self._headroom(cache, self._running, self._longest)
        self._spare_bytes = cache.bound(max(0, self.room_bytes - others - compiling - headroom))
        for generation in running:
            if text := self.refusal(cache, len(generation.session.recorded)):
                return generation, text
        if not running or self._lacking(cache, others) <= 0:
            return None
        self._drop_unused()
        self._meter.settle()  # a busy CPU releases buffers a moment after their last use
        others = self._others(cache)
        lacking = self._lacking(cache, others)
        if lacking <= 0:
            return None
        if cache.paged_bytes >= lacking:  # only snapshots of running requests are left
            log.warning("freeing the checkpoints of running requests", lacking_bytes=lacking)
            cache.detach()
            return None
        youngest = max(running, key=lambda generation: generation.request.number)
        if len(running) == 1 and self._measures_again(youngest.request.number, cache.nbytes + others):
            return None
        numbers = self._numbers("running requests", cache.nbytes, self._beside(others))
        return youngest, f"there is no room to go on: {numbers}. {_ADVICE}, or run fewer at once (--parallel)"

    def _measures_again(self, number: int, held_bytes: int) -> bool:
        """Forgets the memory that slices took, if only these estimates keep a lone request from continuing: they are
        too high if a busy machine released buffers late. Returns True if the next slice measures again. This happens
        once for each request: if that slice takes as much, the request ends."""
        if number == self._measured_for or held_bytes + self._reuse_bytes > self.room_bytes:
            return False
        self.workspace = WorkspaceEstimate()
        self._step_bytes = 0
        self._measured_for = number
        return True

    def make_room(self, cache: PrefixCache, nbytes: int) -> None:
        """Evicts unused cache entries until an item of media, whose encoding takes `nbytes` at one time, fits. Raises
        RequestError if the item does not fit even then."""
        if self.budget_bytes is None:
            return
        for free in (None, self._drop_unused, self._meter.settle):
            if free is not None:
                free()
            beside = self._others(cache) + self._fixed() + nbytes
            cache.bound(max(0, self.room_bytes - beside))
            if cache.nbytes + beside <= self.room_bytes:
                return
        numbers = self._numbers("running requests", cache.nbytes, beside)
        raise RequestError(
            f"there is no room to encode a picture or a sound: {numbers}. Send a smaller one, or give the runner more"
            " (--memory)"
        )

    def allows_drafts(self, cache: PrefixCache) -> bool:
        """Returns True if the requests that ran at the last `fit` leave room for rounds of drafts, and a reserve."""
        needed = _ROUND_ROWS * self._step_bytes + self._draft_bytes + self.room_bytes // _SHARE
        return cache.allows(max(0, needed - self._spare_bytes))

    def free(self, cache: PrefixCache) -> None:
        """Frees all unused memory. Called after MLX has found no memory."""
        self._drop_unused()
        cache.evict()
        self._meter.clear()

    # --- around each slice

    def slice_tokens(self, cache: PrefixCache, most: int, position: int) -> int:
        """Returns the length of the next slice of a prompt at `position`: `most` tokens, or fewer if room is short."""
        if self.budget_bytes is None:
            return most
        growth = self._growth(cache, self._running)
        free = self.room_bytes - cache.nbytes - self._others(cache) - self._fixed() - growth
        return min(most, self.workspace.tokens_in(max(0, free), position + most))

    def measured(self, forward: "Forward") -> "Forward":
        """Returns `forward` such that each call starts a measurement, for `prefilled` or `stepped`. Costs under a
        microsecond."""

        def measured(tokens: mx.array, layers: list[object]) -> mx.array:
            self._read_peak()
            self._start_bytes = self._meter.active()  # only now: the cache may just have copied layers
            return forward(tokens, layers)

        return measured

    def prefilled(self, tokens: int, position: int) -> None:
        """Learns from a measured slice of `tokens` tokens, which ended at `position`."""
        self.workspace.learn(tokens, position, self._taken())

    def stepped(self, rows: int) -> None:
        """Learns from a measured decode step in which each answer had `rows` rows. Ignores rounds, of several rows:
        answers do not need them. The maximum over all steps decays slowly."""
        if rows > 1:
            return
        self._step_bytes = max(self._step_bytes - self._step_bytes // _FADE_STEPS, self._taken())

    def peak(self) -> int:
        """Returns the most bytes that were ever in use."""
        self._peak_bytes = max(self._peak_bytes, self._meter.peak())
        return self._peak_bytes

    # --- arithmetic

    def _taken(self) -> int:
        """Returns the most bytes in use since the measurement began, less the bytes in use before or now, if more."""
        return max(0, self._read_peak() - max(self._start_bytes, self._meter.active()))

    def _read_peak(self) -> int:
        """Returns the most bytes in use since the last call, and starts the next measurement."""
        peak = self._meter.peak()
        self._meter.restart()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def _others(self, cache: PrefixCache) -> int:
        """Returns the bytes outside the weights and the cache."""
        return max(0, self._meter.active() - self.weights_bytes - cache.nbytes) + self._grammar_bytes()

    def _beside(self, others: int) -> int:
        """Returns the bytes that the next slice needs outside the cache."""
        return others + self._fixed() + self.workspace.likely_bytes(LEAST_SLICE_TOKENS, self._longest)

    def _lacking(self, cache: PrefixCache, others: int) -> int:
        """Returns the bytes that are missing for the shortest next slice; negative if some are left."""
        return cache.nbytes + self._beside(others) - self.room_bytes

    def _fixed(self) -> int:
        return self._reuse_bytes + self._step_bytes

    def _growth(self, cache: PrefixCache, answers: int) -> int:
        """Returns the bytes by which `answers` answers may grow in one step."""
        return answers * (cache.session_bytes(_GROWTH_TOKENS) - cache.session_bytes(0))

    def _headroom(self, cache: PrefixCache, answers: int, context: int) -> int:
        """Returns the bytes to leave free: for a whole chunk of a prompt, or for less if that is much of the room."""
        chunk = min(self.workspace.likely_bytes(self._chunk_tokens, context), self.room_bytes // _SHARE)
        least = self.workspace.likely_bytes(LEAST_SLICE_TOKENS, context)
        return self._fixed() + self._growth(cache, answers) + max(chunk, least)

    def _numbers(self, what: str, kept: int, beside: int) -> str:
        return (
            f"the keys and values of {what} take about {sized(kept)}, computing them {sized(beside)} more; the budget"
            f" is {sized(self.budget_bytes or 0)}, of which the model leaves {sized(self.room_bytes)}"
        )


def set_limits(budget_bytes: int, *, on_cpu: bool) -> int:
    """Sets MLX's own limits. Called when the weights are loaded. Returns the bytes that MLX may always keep for reuse:
    none on a GPU, which frees reusable buffers before it exceeds the limit; a CPU does not check the limit."""
    mx.set_memory_limit(budget_bytes)
    reuse_bytes = max(0, budget_bytes - mx.get_active_memory()) // _REUSE
    before = mx.set_cache_limit(reuse_bytes)
    mx.set_cache_limit(min(before, reuse_bytes))
    mx.clear_cache()
    return min(before, reuse_bytes) if on_cpu else 0
