"""One budget for everything that MLX holds: the weights, the cache, the running requests, and what a slice takes.

    budget  =  weights  +  room
    room    =  cache (keys and values of running requests, and snapshots)
             + other memory (samplers, dispatched forwards, grammars)
             + headroom (the next slice of a prompt, the growth of answers, MLX's own reuse)

The cache may hold what the headroom leaves, and no more than `--cache-memory`. As contexts grow, the headroom grows,
and unused cache entries are evicted. If that is not enough, slices become shorter, then new requests wait; a request
that can never fit is refused. Every refusal has the numbers.
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

_FIRST_TOKEN_BYTES = 1 << 20  # for the very first slice: more than a token takes in most models
_GROWTH_TOKENS = 256  # layers grow by this many tokens at a time
_ROUND_ROWS = 8  # of a round of drafts on a CPU
_FADE_STEPS = 1024
_SHARE = 4  # of the room: what a slice may take for speed alone
_REUSE = 16  # of the room: what MLX may keep of freed buffers for the next ones
_ADVICE = "Shorten the prompt, let keys and values take less (--kv-bits 8), or give the runner more (--memory)"


class _Sample(NamedTuple):
    """The maximum over some slices whose contexts were about equally long."""

    context: int
    token_bytes: float


class WorkspaceEstimate:
    """Estimates the memory that a slice of a prompt takes beside what it leaves: by the most that a token took so far,
    for each length of the context before it. Owner: the engine thread.

    A token's own activations cost the same everywhere, and its attention grows in proportion to the context. So the
    cost of a token never falls as the context grows, and rises along a line. Lengths between two powers of two count as
    one.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def learn(self, tokens: int, context: int, nbytes: int) -> None:
        """Learns from a slice over `tokens` that left a context of `context` tokens, and took `nbytes` meanwhile."""
        token_bytes = nbytes / max(tokens, LEAST_SLICE_TOKENS)
        before = self._samples.get(context.bit_length(), _Sample(0, 0.0))
        self._samples[context.bit_length()] = _Sample(
            max(before.context, context), max(before.token_bytes, token_bytes)
        )

    def likely_bytes(self, tokens: int, context: int) -> int:
        """Returns about what a slice of `tokens` will take in a context of `context`; 0 before the first slice."""
        return ceil(max(tokens, LEAST_SLICE_TOKENS) * self._token_bytes(context))

    def certain_bytes(self, tokens: int, context: int) -> int:
        """Returns what such a slice will take at least. Does not extrapolate to contexts longer than any so far."""
        known = [each.token_bytes for each in self._samples.values() if each.context <= context]
        return ceil(max(tokens, LEAST_SLICE_TOKENS) * max(known, default=0.0))

    def tokens_in(self, nbytes: int, context: int) -> int:
        """Returns the tokens of a slice that takes `nbytes`, at least LEAST_SLICE_TOKENS."""
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
    """MLX's own account of its memory, in bytes. There is one in a process, as there is one MLX."""

    active = staticmethod(mx.get_active_memory)
    """Returns the bytes in use."""
    restart = staticmethod(mx.reset_peak_memory)
    """Forgets the peak."""
    peak = staticmethod(mx.get_peak_memory)
    """Returns the most bytes that were in use since the last `restart`."""
    clear = staticmethod(mx.clear_cache)
    """Frees the buffers that are kept for reuse."""

    def settle(self) -> None:
        """Waits until everything that was dispatched is computed and its buffers are released."""
        mx.synchronize()


class MemoryBudget:
    """Decides what fits. Owner: the engine thread. Reads numbers from a meter; everything else is arithmetic."""

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
        """Made when the weights are loaded and nothing else is. `budget_bytes` None bounds nothing; `chunk_tokens` is
        the longest slice of a prompt, `reuse_bytes` what MLX may keep for reuse whatever else is needed,
        `grammar_bytes` what grammars take of the same memory, and `drop_unused` frees what no request needs now beside
        the cache: grammars and the features of media. A model that drafts may hold `draft_bytes` beside its weights;
        the grammar of an answer is likely to take `one_grammar_bytes` once it is compiled."""
        # For good.
        self.budget_bytes = budget_bytes
        self.weights_bytes = meter.active()
        self.one_grammar_bytes = one_grammar_bytes
        self._meter = meter
        self._chunk_tokens = chunk_tokens
        self._reuse_bytes = reuse_bytes
        self._grammar_bytes = grammar_bytes
        self._drop_unused = drop_unused
        self._draft_bytes = draft_bytes
        # Learned from slices.
        self.workspace = WorkspaceEstimate()
        self._step_bytes = 0  # the most that decode steps took, beside what they left
        self._peak_bytes = 0
        self._measured_for = -1  # the last request for which slices were measured again
        # As of the last `fit`.
        self._running = 0
        self._longest = 0  # tokens of the longest context
        self._spare_bytes = 0  # of the room, beyond what the cache may ever hold
        # Of the present slice.
        self._start_bytes = 0

    @property
    def room_bytes(self) -> int:
        """The part of the budget that the weights leave."""
        return max(0, (self.budget_bytes or 0) - self.weights_bytes)

    # --- before a request begins, and after each end

    def refusal(self, cache: PrefixCache, tokens: int) -> str:
        """Returns why a context of `tokens` could not be computed even alone; empty if it could."""
        if self.budget_bytes is None:
            return ""
        kept = cache.session_bytes(tokens)
        beside = self._reuse_bytes + self.workspace.certain_bytes(LEAST_SLICE_TOKENS, tokens)
        if kept + beside <= self.room_bytes:
            return ""
        return f"there is no room for so long a context: {self._numbers(f'{tokens} tokens', kept, beside)}. {_ADVICE}"

    def admits(self, cache: PrefixCache, tokens: int, *, grammar: bool = False) -> bool:
        """Returns True if a request of `tokens`, perhaps with a grammar, fits beside the requests that ran at the last
        `fit`."""
        if not cache.admits(tokens):
            return False
        if self.budget_bytes is None or not self._running:
            return True
        longer = self.workspace.certain_bytes(LEAST_SLICE_TOKENS, tokens)
        computing = longer - self.workspace.likely_bytes(LEAST_SLICE_TOKENS, self._longest)
        needed = cache.session_bytes(tokens + _GROWTH_TOKENS) + self._growth(cache, 1) + max(0, computing)
        return cache.allows(needed + self.one_grammar_bytes * grammar)

    def fit(self, cache: PrefixCache, running: "Sequence[Generation]") -> "tuple[Generation, str] | None":
        """Bounds the cache to what running requests leave. Returns a request that must end even so, and why.

        That is one that would not fit even alone; otherwise, if they do not fit together though nothing else is kept,
        the youngest. Call again when it has ended.
        """
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
        self._meter.settle()  # a busy CPU releases buffers a moment after it has computed with them
        others = self._others(cache)
        lacking = self._lacking(cache, others)
        if lacking <= 0:
            return None
        if cache.paged_bytes >= lacking:  # snapshots of running requests: the others have none left
            log.warning("freeing the checkpoints of running requests", lacking_bytes=lacking)
            cache.detach()
            return None
        youngest = max(running, key=lambda generation: generation.request.number)
        if len(running) == 1 and self._measures_again(youngest.request.number, cache.nbytes + others):
            return None
        numbers = self._numbers("running requests", cache.nbytes, self._beside(others))
        return youngest, f"there is no room to go on: {numbers}. {_ADVICE}, or run fewer at once (--parallel)"

    def _measures_again(self, number: int, held_bytes: int) -> bool:
        """Forgets what slices took, if nothing else keeps a request that runs alone from going on. A busy machine may
        have released some buffers late, and a request that ends for it would correct nothing, nor would the next. Once
        for each request: if the next slice takes as much, it ends."""
        if number == self._measured_for or held_bytes + self._reuse_bytes > self.room_bytes:
            return False
        self.workspace = WorkspaceEstimate()
        self._step_bytes = 0
        self._measured_for = number
        return True

    def make_room(self, cache: PrefixCache, nbytes: int) -> None:
        """Evicts unused cache entries until an item of media can be encoded, which takes `nbytes` at once. Raises
        RequestError if it cannot, even so."""
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
        """Returns True if the requests that ran at the last `fit` leave room for steps over several tokens, and some to
        spare."""
        needed = _ROUND_ROWS * self._step_bytes + self._draft_bytes + self.room_bytes // _SHARE
        return cache.allows(max(0, needed - self._spare_bytes))

    def free(self, cache: PrefixCache) -> None:
        """Frees all unused memory, because MLX found none."""
        self._drop_unused()
        cache.evict()
        self._meter.clear()

    # --- around each slice

    def slice_tokens(self, cache: PrefixCache, most: int, position: int) -> int:
        """Returns the tokens of the next slice of a prompt at `position`: `most`, or as many as there is room for."""
        if self.budget_bytes is None:
            return most
        growth = self._growth(cache, self._running)
        free = self.room_bytes - cache.nbytes - self._others(cache) - self._fixed() - growth
        return min(most, self.workspace.tokens_in(max(0, free), position + most))

    def measured(self, forward: "Forward") -> "Forward":
        """Returns the forward such that each call starts a measurement, which `prefilled` or `stepped` ends. Costs less
        than a microsecond."""

        def measured(tokens: mx.array, layers: list[object]) -> mx.array:
            self._read_peak()
            self._start_bytes = self._meter.active()  # not earlier: the cache may have copied something
            return forward(tokens, layers)

        return measured

    def prefilled(self, tokens: int, position: int) -> None:
        """Learns from a measured slice of `tokens`, which ended at `position`."""
        self.workspace.learn(tokens, position, self._taken())

    def stepped(self, rows: int) -> None:
        """Learns from a measured decode step of `rows` an answer. Ignores rounds of several rows: answers can do
        without them. The maximum over all steps decays slowly."""
        if rows > 1:
            return
        self._step_bytes = max(self._step_bytes - self._step_bytes // _FADE_STEPS, self._taken())

    def peak(self) -> int:
        """Returns the most that was ever in use, in bytes."""
        self._peak_bytes = max(self._peak_bytes, self._meter.peak())
        return self._peak_bytes

    # --- arithmetic

    def _taken(self) -> int:
        """Returns the most that was in use at once since the measurement began, less what was before or is now."""
        return max(0, self._read_peak() - max(self._start_bytes, self._meter.active()))

    def _read_peak(self) -> int:
        """Returns the peak since the last call, and begins the next."""
        peak = self._meter.peak()
        self._meter.restart()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def _others(self, cache: PrefixCache) -> int:
        """Returns the bytes that belong neither to the weights nor to the cache."""
        return max(0, self._meter.active() - self.weights_bytes - cache.nbytes) + self._grammar_bytes()

    def _beside(self, others: int) -> int:
        """Returns the bytes that the next slice needs beside the cache."""
        return others + self._fixed() + self.workspace.likely_bytes(LEAST_SLICE_TOKENS, self._longest)

    def _lacking(self, cache: PrefixCache, others: int) -> int:
        """Returns the bytes that lack for the next slice, at its shortest; negative if some are left."""
        return cache.nbytes + self._beside(others) - self.room_bytes

    def _fixed(self) -> int:
        return self._reuse_bytes + self._step_bytes

    def _growth(self, cache: PrefixCache, answers: int) -> int:
        """Returns the bytes by which this number of answers may grow at once."""
        return answers * (cache.session_bytes(_GROWTH_TOKENS) - cache.session_bytes(0))

    def _headroom(self, cache: PrefixCache, answers: int, context: int) -> int:
        """Returns what to leave free: for a whole chunk of a prompt if that is no large part of the room, or less."""
        chunk = min(self.workspace.likely_bytes(self._chunk_tokens, context), self.room_bytes // _SHARE)
        least = self.workspace.likely_bytes(LEAST_SLICE_TOKENS, context)
        return self._fixed() + self._growth(cache, answers) + max(chunk, least)

    def _numbers(self, what: str, kept: int, beside: int) -> str:
        return (
            f"the keys and values of {what} take about {sized(kept)}, computing them {sized(beside)} more; the budget"
            f" is {sized(self.budget_bytes or 0)}, of which the model leaves {sized(self.room_bytes)}"
        )


def set_limits(budget_bytes: int, *, on_cpu: bool) -> int:
    """Sets MLX's own limits; called when the weights are loaded. Returns the bytes it may always keep for reuse.

    A GPU frees reusable buffers before it exceeds the limit; a CPU does not check.
    """
    mx.set_memory_limit(budget_bytes)
    reuse_bytes = max(0, budget_bytes - mx.get_active_memory()) // _REUSE
    before = mx.set_cache_limit(reuse_bytes)
    mx.set_cache_limit(min(before, reuse_bytes))
    mx.clear_cache()
    return min(before, reuse_bytes) if on_cpu else 0
