"""The parts of an engine that its requests are computed with, and the port through which these are counted."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from runner.cache import PrefixCache
from runner.cache.session import Session
from runner.engine.first_tokens import FirstTokens, draws_plainly
from runner.engine.generation import Forward, Generation, NoMedia
from runner.engine.memory import MemoryBudget
from runner.engine.policy import Slice, SlicePolicy
from runner.engine.request import Request, ShownPrompt
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.ports import Drafter, PromptMedia, Ranks, Rounds, Shifted


class Observer:
    """Notes what a scheduler does, and changes nothing. This class notes nothing. Owner: the engine thread."""

    def never_began(self, request: Request, outcome: str) -> None:
        """Notes that a request ended without a session; `outcome` is a field of `RequestCounts`."""

    def began(self, generation: Generation) -> None:
        """Notes that a request has its session."""

    def prefilled(self, generation: Generation) -> None:
        """Notes that a slice of its prompt was computed."""

    def stepped(self, generations: Sequence[Generation], now_s: float) -> None:
        """Notes a decode step, by which each of these has its next token."""

    def ended(self, generation: Generation) -> None:
        """Notes that a request is closed."""

    def sliced(self, done: Slice, seconds: float) -> None:
        """Notes that a slice was computed."""

    def cache_replaced(self, cache: PrefixCache) -> None:
        """Notes that this cache is about to be replaced."""


@dataclass(kw_only=True)
class CoreParts:
    """The model, its tokenizer, and what else a request is computed with. Owner: the engine thread."""

    forward: Forward = field(init=False)
    """The forward of answers."""
    tokenizer: Tokenizer = field(init=False)
    context_length: int = field(init=False)
    make_cache: Callable[[], PrefixCache] = field(init=False)
    memory: MemoryBudget = field(init=False)
    policy: SlicePolicy = field(init=False)
    observer: Observer = field(default_factory=Observer)
    salt: str = ""
    """Names what changes the meaning of the cache's contents: prompts of different salts share nothing. Empty for the
    model's own keys and values."""
    show: "Callable[[ShownPrompt], PromptMedia]" = lambda _: NoMedia()
    """Begins with the media of one request, none of which is encoded yet."""
    shifted: "Shifted" = lambda _: nullcontext()
    """Shifts the positions of answers after media."""
    unbatchable: str = ""
    """The reason why requests may not share a batch; empty if they may."""
    drafter: "Callable[[Sequence[int]], Drafter] | None" = None
    """Makes a drafter for the answer to a prompt, given its keys; None if answers are not drafted."""
    rounds: "Callable[..., Rounds] | None" = None
    """Makes the rounds of a batch; set with `drafter`."""
    begin: Callable[..., Generation] = Generation
    """Makes a generation; with a tape, one that notes its tokens there."""
    ranks: "Ranks | None" = None
    """The processes that compute the model together; None if this one has all of it."""
    first_tokens: FirstTokens | None = None
    """The logits after recent prompts; None if every first token is computed."""
    scoring: Callable[[Forward, Sequence[int]], Forward] = lambda forward, _: forward
    """Wraps a forward so that the last logits of these tokens are computed in float32, for scores."""

    def forward_of(self, request: Request) -> Forward:
        """Returns the forward by which a request decodes."""
        candidates = request.sampling.candidates
        return self.scoring(self.forward, candidates) if candidates else self.forward

    def generation(self, request: Request, session: Session, started_ns: int) -> Generation:
        """Returns the generation of a request that left the queue at `started_ns`, in this session."""
        media = NoMedia() if request.shown is None else self.show(request.shown)
        drafter = self.drafter(request.keys) if self.drafter is not None else None
        broadcast = self.ranks.broadcast if self.ranks is not None else None
        rest = (started_ns, media, drafter, broadcast)
        generation = self.begin(request, session, self.tokenizer, self.context_length, *rest)
        if self.first_tokens is not None and draws_plainly(request):
            generation.keep_logits = partial(self.first_tokens.keep, request.keys)
        return generation

    def open_session(self, request: Request, cache: PrefixCache) -> Session:
        """Opens a session of the cache for a request. If the same prompt was computed recently, the session knows the
        first token of the answer."""
        first = self.first_tokens.draw(request) if self.first_tokens is not None else None
        return cache.begin(request.keys, self.salt, None if first in self.tokenizer.eos else first)
