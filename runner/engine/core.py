"""The parts of an engine with which requests are computed, and the port through which requests are counted."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from runner.cache import PrefixCache
from runner.cache.layers.compiled import CompiledSteps
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
    """Notes the events of a scheduler, and changes nothing. This base class notes nothing. Owner: the engine thread."""

    def never_began(self, request: Request, outcome: str) -> None:
        """Notes that a request ended without a session; `outcome` is a field of `RequestCounts`."""

    def began(self, generation: Generation) -> None:
        """Notes that a session was opened for a request."""

    def prefilled(self, generation: Generation) -> None:
        """Notes that a slice of the request's prompt was computed."""

    def stepped(self, generations: Sequence[Generation], now_s: float) -> None:
        """Notes a decode step, which gave each of `generations` its next token."""

    def ended(self, generation: Generation) -> None:
        """Notes that a request is closed."""

    def sliced(self, done: Slice, seconds: float) -> None:
        """Notes that a slice was computed."""

    def cache_replaced(self, cache: PrefixCache) -> None:
        """Notes that `cache` is about to be replaced."""


@dataclass(kw_only=True, eq=False, repr=False)
class CoreParts:
    """The model, its tokenizer, and the other parts with which a request is computed. Owner: the engine thread."""

    forward: Forward = field(init=False)
    """The forward that computes logits for prompts and answers."""
    step: CompiledSteps | None = None
    """The same forward with compiled decode steps. None if steps are not compiled."""
    tokenizer: Tokenizer = field(init=False)
    context_length: int = field(init=False)
    make_cache: Callable[[], PrefixCache] = field(init=False)
    memory: MemoryBudget = field(init=False)
    policy: SlicePolicy = field(init=False)
    observer: Observer = field(default_factory=Observer)
    salt: str = ""
    """Names a setting that changes the meaning of the cache's contents: prompts with different salts share nothing.
    Empty for the model's own keys and values."""
    show: "Callable[[ShownPrompt], PromptMedia]" = lambda _: NoMedia()
    """Returns the media of one request, none of which is encoded yet."""
    shifted: "Shifted" = lambda _: nullcontext()
    """Returns a block in which forwards shift the positions of answers after media."""
    unbatchable: str = ""
    """The reason why requests cannot share a batch. Empty if they can."""
    drafter: "Callable[[Sequence[int]], Drafter] | None" = None
    """Makes a drafter for an answer, given the keys of its prompt. None if answers are not drafted."""
    rounds: "Callable[..., Rounds] | None" = None
    """Makes the rounds of a batch. Set if, and only if, `drafter` is set."""
    begin: Callable[..., Generation] = Generation
    """Makes a generation. With a tape, the generation notes its tokens on the tape."""
    ranks: "Ranks | None" = None
    """The processes that compute the model together. None if this process computes all of the model."""
    first_tokens: FirstTokens | None = None
    """The logits after recent prompts. None if no logits are kept."""
    scoring: Callable[[Forward, Sequence[int]], Forward] = lambda forward, _: forward
    """Wraps a forward so that the last logits of the given tokens are computed in float32, for scores."""

    def forward_of(self, request: Request) -> Forward:
        """Returns the forward by which a request decodes: a more exact one for scores, and one without compiled steps
        after media, which may shift positions."""
        if candidates := request.sampling.candidates:
            return self.scoring(self.forward, candidates)
        return self.forward if self.step is None or request.shown is not None else self.step

    def generation(self, request: Request, session: Session, started_ns: int) -> Generation:
        """Makes the generation of a request in the given session. The request left the queue at `started_ns`."""
        media = NoMedia() if request.shown is None else self.show(request.shown)
        drafter = self.drafter(request.keys) if self.drafter is not None else None
        broadcast = self.ranks.broadcast if self.ranks is not None else None
        rest = (started_ns, media, drafter, broadcast)
        generation = self.begin(request, session, self.tokenizer, self.context_length, *rest)
        if self.first_tokens is not None and draws_plainly(request):
            generation.keep_logits = partial(self.first_tokens.keep, request.keys)
        return generation

    def open_session(self, request: Request, cache: PrefixCache) -> Session:
        """Opens a session of the cache for a request. If the same prompt was computed recently, the session already
        holds the first token of the answer."""
        first = self.first_tokens.draw(request) if self.first_tokens is not None else None
        return cache.begin(request.keys, self.salt, None if first in self.tokenizer.eos else first)
