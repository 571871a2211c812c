"""The things that all requests of one engine share."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from runner.cache import Cache
from runner.cache.session import LiveSession
from runner.engine.generation import Forward, Generation
from runner.engine.memory.budget import MemoryBudget
from runner.engine.request import Request
from runner.engine.trial import SettledTrial, Trial
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.drafting import Drafting
    from runner.engine.pictures.encoder import PictureEncoder
    from runner.engine.ranks.interface import Ranks
    from runner.engine.tape.interface import Tape


class EngineContext(NamedTuple):
    """The model, its tokenizer, and what else a request is computed with."""

    forward: Forward
    tokenizer: Tokenizer
    context_length: int
    make_cache: Callable[[], Cache]
    memory: MemoryBudget
    salt: str = ""
    """Names what changes the meaning of the cache's contents: prompts of different salts share nothing."""
    encoder: "PictureEncoder | None" = None
    """The encoder of pictures, of a model that sees."""
    trial: Trial = SettledTrial()
    """The trial that decides whether requests may share a batch."""
    drafting: "Drafting | None" = None
    """Drafts answers; None if that is off."""
    tape: "Tape | None" = None
    """Where requests note what becomes of them; None if nothing is recorded."""
    ranks: "Ranks | None" = None
    """The processes that compute the model together; None if this one has all of it."""
    scoring: Callable[[Forward, Sequence[int]], Forward] = lambda forward, _: forward
    """Makes a forward whose last logits of these tokens are as exact as scores of the model have to be."""

    def forward_of(self, request: Request) -> Forward:
        """Returns the forward by which a request decodes."""
        candidates = request.sampling.candidates
        return self.scoring(self.forward, candidates) if candidates else self.forward

    def generation(self, request: Request, session: LiveSession, started_ns: int) -> Generation:
        """Returns the generation of a request that left the queue at `started_ns`."""
        pictures = None
        if request.pictures is not None and self.encoder is not None:
            from runner.engine.pictures.progress import PictureProgress  # no text needs it

            pictures = PictureProgress(request.pictures, self.encoder)
        drafter = None
        if self.drafting is not None:
            drafter = self.drafting.drafter(request.keys)
        rest = (request, session, self.tokenizer, self.context_length, started_ns, pictures)
        if self.tape is None:
            generation = Generation(*rest, drafter)
        else:
            from runner.engine.tape.generation import TapedGeneration  # most engines have no tape

            generation = TapedGeneration(self.tape, *rest, drafter)
        if self.ranks is not None:
            generation.agree = self.ranks.agree
        if drafter is not None:
            drafter.life = generation.life
        return generation
