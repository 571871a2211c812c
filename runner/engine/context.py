"""The things that all requests of one engine share."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from runner.cache import PrefixCache
from runner.cache.session import Session
from runner.engine.generation import Forward, Generation, NoPictures
from runner.engine.memory import MemoryBudget
from runner.engine.request import Request, ShownPrompt
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.ports import Drafts, Pictures, Ranks, Shifted


class EngineContext(NamedTuple):
    """The model, its tokenizer, and what else a request is computed with."""

    forward: Forward
    tokenizer: Tokenizer
    context_length: int
    make_cache: Callable[[], PrefixCache]
    memory: MemoryBudget
    salt: str = ""
    """Names what changes the meaning of the cache's contents: prompts of different salts share nothing."""
    show: "Callable[[ShownPrompt], Pictures]" = lambda _: NoPictures()
    """Begins with the pictures of one request, none of which is encoded yet."""
    shifted: "Shifted" = lambda _: nullcontext()
    """Shifts the positions of answers after pictures."""
    unbatchable: str = ""
    """The reason why requests may not share a batch; empty if they may."""
    drafting: "Drafts | None" = None
    """Drafts answers; None if that is off."""
    begin: Callable[..., Generation] = Generation
    """Makes a generation; of one that is recorded, its tape knows."""
    ranks: "Ranks | None" = None
    """The processes that compute the model together; None if this one has all of it."""
    scoring: Callable[[Forward, Sequence[int]], Forward] = lambda forward, _: forward
    """Makes a forward whose last logits of these tokens are as exact as scores of the model have to be."""

    def forward_of(self, request: Request) -> Forward:
        """Returns the forward by which a request decodes."""
        candidates = request.sampling.candidates
        return self.scoring(self.forward, candidates) if candidates else self.forward

    def generation(self, request: Request, session: Session, started_ns: int) -> Generation:
        """Returns the generation of a request that left the queue at `started_ns`."""
        pictures = NoPictures() if request.pictures is None else self.show(request.pictures)
        drafter = self.drafting.drafter(request.keys) if self.drafting is not None else None
        generation = self.begin(request, session, self.tokenizer, self.context_length, started_ns, pictures, drafter)
        if self.ranks is not None:
            generation.broadcast = self.ranks.broadcast
        return generation
