"""The things that all requests of one engine share."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from runner.cache import PrefixCache
from runner.cache.session import Session
from runner.engine.first_tokens import FirstTokens
from runner.engine.generation import Forward, Generation, NoMedia
from runner.engine.memory import MemoryBudget
from runner.engine.request import Request, ShownPrompt
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.batch import Batch
    from runner.engine.ports import Drafter, PromptMedia, Ranks, Rounds, Shifted


class EngineContext(NamedTuple):
    """The model, its tokenizer, and what else a request is computed with."""

    forward: Forward
    tokenizer: Tokenizer
    context_length: int
    make_cache: Callable[[], PrefixCache]
    memory: MemoryBudget
    salt: str = ""
    """Names what changes the meaning of the cache's contents: prompts of different salts share nothing."""
    show: "Callable[[ShownPrompt], PromptMedia]" = lambda _: NoMedia()
    """Returns the media of one request, not encoded yet."""
    shifted: "Shifted" = lambda _: nullcontext()
    """Shifts the positions of answers after media."""
    unbatchable: str = ""
    """The reason why requests may not share a batch; empty if they may."""
    drafter: "Callable[[Sequence[int]], Drafter] | None" = None
    """Makes a drafter for the answer to a prompt, given its keys; None if answers are not drafted."""
    rounds: "Callable[[Batch], Rounds] | None" = None
    """Makes the rounds of a batch; set with it."""
    begin: Callable[..., Generation] = Generation
    """Makes a generation; with a tape, one that notes its tokens there."""
    ranks: "Ranks | None" = None
    """The processes that compute the model together; None if this one has all of it."""
    first_tokens: FirstTokens | None = None
    """The logits after recent prompts; None if every first token is computed."""
    scoring: Callable[[Forward, Sequence[int]], Forward] = lambda forward, _: forward
    """Makes a forward whose last logits of these tokens are as exact as scores of the model have to be."""

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
        if self.first_tokens is not None and _draws_plainly(request):
            generation.keep_logits = partial(self.first_tokens.keep, request.keys)
        return generation

    def open_session(self, request: Request, cache: PrefixCache) -> Session:
        """Opens a session of the cache for a request. If the same prompt was computed recently, the session knows the
        first token of the answer."""
        return cache.begin(request.keys, self.salt, self._first_token(request))

    def _first_token(self, request: Request) -> int | None:
        """Returns the first token of an answer if it is known and others follow it."""
        if self.first_tokens is None or request.max_tokens < 2 or not _draws_plainly(request):
            return None
        token = self.first_tokens.draw(request)
        return None if token in self.tokenizer.eos else token


def _draws_plainly(request: Request) -> bool:
    return request.grammar is None and not request.sampling.logprobs and not request.sampling.candidates
