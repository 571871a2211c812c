"""The parts of an engine, the world that its values come from, and the steps in which wings add to them. Owner: the
engine thread."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import mlx.core as mx
import msgspec

from protocol.stats import DiskCounts, DraftCounts, EmbeddingCounts, MediaCounts
from runner.cache.layer_interface import MakeLayers
from runner.cache.sketch import Sketch
from runner.engine.generation import Forward, Generation, NoMedia
from runner.engine.memory import Meter
from runner.engine.observer import Observer
from runner.engine.policy import SlicePolicy
from runner.engine.ports import EncoderUse, NoFormats, NoVision, Vision
from runner.engine.scheduler import Scheduler
from runner.model import OpenedModel
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.loading import LoadedModel, load
from runner.settings import CheckSettings, Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.batch import Batch
    from runner.engine.ports import Beside, Drafter, Formats, Names, PromptMedia, Ranks, Rounds, Shifted, Tier
    from runner.engine.request import ShownPrompt


# --- The world of an engine: where the values come from that its decisions follow from. Here it is the world itself. A
# tape (runner/tape) notes these values or gives noted ones in their place, and ranks (runner/ranks) follow those of
# their leader: each derives from these classes.

Post = Callable[[Callable[[], None] | None], None]
"""Has the engine thread call a function between two slices; with None it only wakes an engine that waits."""


class Sources(NamedTuple):
    """The parts of an engine through which values come in while it computes."""

    forward: Forward
    meter: Meter
    clock: Callable[[], float]
    """Seconds, from any beginning."""
    policy: SlicePolicy
    reuse_bytes: int
    """The bytes of freed arrays that MLX keeps for reuse."""
    grammar_bytes: Callable[[], int]
    """The bytes that other processes of this runner take from the budget."""
    begin: Callable[..., Generation] = Generation
    """Makes a generation."""
    step_s: Callable[[float], float] = float
    """Takes the seconds that a decode step took, and returns those to learn from."""


class World:
    """The world itself: every value is what it is, and this process has the whole model."""

    ranks: "Ranks | None" = None
    """The processes that compute the model together; None if this one has all of it."""

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        """Returns the memory of the machine and what MLX may hold of it, before the weights are loaded."""
        return total_bytes, budget_bytes

    def load(self, model: OpenedModel, dtype: str, budget_bytes: int) -> LoadedModel:
        """Loads the model, or the part of it that this process computes. Raises ModelError."""
        return load(model, dtype, budget_bytes)

    def loaded(self, total_bytes: int, budget_bytes: int, run: Forward) -> tuple[int, int, Forward]:
        """Returns the same two, and the forward, once the weights are loaded. Raises RankError if a rank has ended."""
        return total_bytes, budget_bytes, run

    def forward(self, run: Forward) -> Forward:
        """Returns the forward that is called in place of this one."""
        return run

    def wrap(self, sources: Sources) -> Sources:
        """Returns the sources that the engine reads in place of these."""
        return sources


# --- The parts, and what wings do to them.


@dataclass
class WingCounts:
    """The numbers of the wings; of one that is off, its zeros."""

    media: Callable[[], MediaCounts] = MediaCounts
    drafts: Callable[[], DraftCounts] = DraftCounts
    disk: Callable[[], DiskCounts] = DiskCounts
    embeddings: Callable[[], EmbeddingCounts] = EmbeddingCounts


@dataclass
class Parts:
    """The parts of an engine. `runner.assemble.assemble` sets them from top to bottom, and between its steps each wing
    reads what is there, and sets or wraps what is its own. Any thread may use `tokenizer`, `vision` and `formats`; the
    rest belongs to the engine thread."""

    # When nothing is loaded.
    settings: Settings
    model: OpenedModel
    world: World
    post: Post
    on_cpu: bool
    total_bytes: int
    """The memory of the device."""
    budget_bytes: int
    """The most that MLX may hold (`--memory`)."""

    # When the weights are loaded.
    loaded: LoadedModel = field(init=False)
    tokenizer: Tokenizer = field(init=False)

    # When the wings have loaded their own.
    logits: Forward = field(init=False)
    """The model's own forward, on all ranks together."""
    make_layers: MakeLayers = field(init=False)
    salt: str = ""
    """Names what changes the meaning of the cache's contents; empty for the model's own keys and values."""
    sources: Sources = field(init=False)
    forward: Forward = field(init=False)
    """The forward of answers: that of `sources`, or one that wraps it."""

    # When all is connected.
    sketch: Sketch | None = None
    """Shows what the layers hold, until the model is warmed up; None for an encoder."""
    scheduler: Scheduler = field(init=False)
    warm_up: Callable[[], None] = field(init=False)
    """Computes what a first request would. Raises ComputeError if the model cannot."""

    # What wings set; off until then.
    vision: Vision = field(default_factory=NoVision)
    show: "Callable[[ShownPrompt], PromptMedia]" = lambda _: NoMedia()
    """Begins with the media of one request, none of which is encoded yet."""
    shifted: "Shifted" = lambda _: nullcontext()
    """Shifts the positions of answers after media."""
    names: "Names | None" = None
    """The names of media in the keys of caches."""
    formats: "Formats" = field(default_factory=NoFormats)
    drafter: "Callable[[Sequence[int]], Drafter] | None" = None
    """Makes a drafter for the answer to a prompt, given its keys."""
    rounds: "Callable[[Batch], Rounds] | None" = None
    """Makes the rounds of a batch; set with it."""
    disk: "Tier | None" = None
    beside: "list[Beside]" = field(default_factory=list)
    """Work beside the scheduler; the tier is in it."""
    encoder_use: EncoderUse = field(default_factory=EncoderUse)
    observer: Observer = field(default_factory=Observer)
    counts: WingCounts = field(default_factory=WingCounts)
    draft_bytes: int = 0
    """What a model that drafts may hold beside its weights."""
    grammar_bytes: int = 0
    """What the grammar of an answer is likely to take of the budget, before it is compiled."""
    helper_bytes: list[Callable[[], int]] = field(default_factory=list)
    """What other processes of this runner take of the budget."""
    drop_unused: list[Callable[[], None]] = field(default_factory=list)
    """Free what no request needs now, beside the cache."""

    @property
    def shares_memory(self) -> bool:
        """True if the device and ordinary processes use the same memory."""
        return self.on_cpu or mx.metal.is_available()

    @property
    def held_bytes(self) -> tuple[int, int]:
        """What MLX holds: in use, and kept for reuse."""
        return mx.get_active_memory(), mx.get_cache_memory()

    @property
    def free_bytes(self) -> int:
        """What MLX may take now, beside what it holds."""
        return self.budget_bytes - mx.get_active_memory()


class Examined(NamedTuple):
    """A model that would load, as `mlx-runner check` knows it: by headers alone."""

    model: OpenedModel
    loaded: LoadedModel
    """Made of placeholders."""
    types: DtypePlan
    tokenizer: Tokenizer
    budget_bytes: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What `mlx-runner check` reports of a wing: its fields, or the text of its line."""

    @property
    def text(self) -> str:
        raise NotImplementedError

    @property
    def is_fault(self) -> bool:
        """True if `check` has failed for it, although the model would load."""
        return False


class Wing:
    """A capability beside the core, as it joins an engine that is being built. No step needs to do anything; what one
    raises ends the start."""

    name: ClassVar[str]
    """That of its folder."""

    def tensors(self, model: OpenedModel) -> Iterable[LogicalTensor]:
        """Returns the tensors that it reads of a model's files, in addition to those of the text model."""
        del model
        return ()

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        """Returns what `mlx-runner check` reports, by the fields of its report; `found` is None if the model would not
        load. Raises ModelError for what would end the start."""
        del settings, found
        return {}

    def reserve(self, parts: Parts) -> int:
        """Returns the bytes of the budget that loading the weights should leave. Nothing is loaded yet."""
        del parts
        return 0

    def load(self, parts: Parts) -> None:
        """Loads what computes beside the model, whose weights and tokenizer are there."""

    def plug(self, parts: Parts) -> None:
        """Sets what requests are computed with. All that computes is loaded."""

    def join(self, parts: Parts) -> None:
        """Connects itself with the scheduler, which is there."""
