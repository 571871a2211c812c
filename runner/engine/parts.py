"""The parts of an engine that is being built, and the steps in which wings add to them. Owner: the engine thread."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import mlx.core as mx
import msgspec

from protocol.stats import DiskCounts, DraftCounts, EmbeddingCounts, MediaCounts
from runner.cache.layer_interface import MakeLayers
from runner.cache.sketch import Sketch
from runner.engine.core import CoreParts
from runner.engine.generation import Forward
from runner.engine.memory import Meter
from runner.engine.ports import EncoderUse, NoFormats, NoVision, Vision
from runner.engine.scheduler import Scheduler
from runner.model import OpenedModel
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.loading import LoadedModel
from runner.settings import CheckSettings, Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.ports import Beside, Formats, Names, Tier

Post = Callable[[Callable[[], None] | None], None]
"""A function that makes the engine thread call the given function between two slices. None only wakes the engine."""


@dataclass(eq=False, repr=False)
class WingCounts:
    """The functions that return the counts of wings. While a wing is off, its function returns zeros."""

    media: Callable[[], MediaCounts] = MediaCounts
    drafts: Callable[[], DraftCounts] = DraftCounts
    disk: Callable[[], DiskCounts] = DiskCounts
    embeddings: Callable[[], EmbeddingCounts] = EmbeddingCounts


@dataclass(eq=False, repr=False)
class Parts(CoreParts):
    """The parts of an engine. `runner.assemble.assemble` sets the parts from top to bottom. Between its steps, each
    wing reads the parts set so far, and sets or wraps its own. Any thread may use `tokenizer`, `vision` and `formats`;
    the other parts belong to the engine thread."""

    # Set before anything is loaded.
    settings: Settings
    model: OpenedModel
    post: Post
    on_cpu: bool
    total_bytes: int
    """The bytes of the device's memory."""
    budget_bytes: int
    """The most bytes that MLX may hold (`--memory`)."""

    # Set when the weights and the tokenizer are loaded.
    loaded: LoadedModel = field(init=False)

    # Set when the wings have loaded their own models.
    logits: Forward = field(init=False)
    """The forward of the whole model. All ranks compute it together."""
    make_layers: MakeLayers = field(init=False)

    # Wrapped by a tape, as `forward`, `policy` and `begin` are.
    meter: Meter = field(default_factory=Meter)
    clock: Callable[[], float] = monotonic
    """Returns the seconds since an arbitrary moment."""
    step_s: Callable[[float], float] = float
    """Maps the measured seconds of a decode step to the seconds to learn from; a tape may replace them."""
    reuse_bytes: int = 0
    """The bytes of freed arrays that MLX may always keep for reuse."""
    outside_bytes: Callable[[], int] = lambda: 0
    """Returns the bytes that other processes of this runner take from the budget."""

    # Set when all parts are connected.
    sketch: Sketch | None = None
    """The sketch, which shows what the layers hold. None after the warm-up, and for an encoder."""
    scheduler: Scheduler = field(init=False)
    warm_up: Callable[[], None] = field(init=False)
    """Computes the forwards of a first request. Raises ComputeError if the model cannot compute."""

    # Set by wings; until then the wing is off.
    vision: Vision = field(default_factory=NoVision)
    names: "Names | None" = None
    """The names of media in the keys of caches. None if the model accepts no media."""
    formats: "Formats" = field(default_factory=NoFormats)
    disk: "Tier | None" = None
    beside: "list[Beside]" = field(default_factory=list)
    """The work beside the scheduler. The tier is a member."""
    encoder_use: EncoderUse = field(default_factory=EncoderUse)
    counts: WingCounts = field(default_factory=WingCounts)
    draft_bytes: int = 0
    """The bytes that a draft model may hold beside its weights."""
    grammar_bytes: int = 0
    """The bytes of the budget that are reserved for an answer's grammar until it is compiled."""
    helper_bytes: list[Callable[[], int]] = field(default_factory=list)
    """Functions whose sum is `outside_bytes`, if processes share the device's memory."""
    drop_unused: list[Callable[[], None]] = field(default_factory=list)
    """Functions that free memory outside the cache that no request needs now."""

    @property
    def shares_memory(self) -> bool:
        """True if the device uses the memory of ordinary processes."""
        return self.on_cpu or mx.metal.is_available()

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The bytes that MLX has in use, and the bytes that MLX keeps for reuse."""
        return mx.get_active_memory(), mx.get_cache_memory()

    @property
    def free_bytes(self) -> int:
        """The bytes that MLX may still take."""
        return self.budget_bytes - mx.get_active_memory()


class Examined(NamedTuple):
    """A model that would load, as `mlx-runner check` knows it: from file headers alone."""

    model: OpenedModel
    loaded: LoadedModel
    """The model, made of placeholders."""
    types: DtypePlan
    tokenizer: Tokenizer
    budget_bytes: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `mlx-runner check` on a wing: its fields for JSON, and `text` for a person."""

    @property
    def text(self) -> str:
        raise NotImplementedError

    @property
    def is_fault(self) -> bool:
        """True if these facts make `check` fail although the model would load."""
        return False


class Wing:
    """A capability beside the core, which joins an engine in four steps while the engine is built: `reserve`, `load`,
    `plug`, `join`. A step may do nothing. An exception in a step ends the start."""

    name: ClassVar[str]
    """The name of the wing's folder."""

    def tensors(self, model: OpenedModel) -> Iterable[LogicalTensor]:
        """Returns the tensors of the model's files that the wing reads, beside those of the text model."""
        del model
        return ()

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        """Returns the wing's facts for `mlx-runner check`, by the fields of the report. `found` is None if the model
        would not load. Raises ModelError for a fault that would end the start."""
        del settings, found
        return {}

    def reserve(self, parts: Parts) -> int:
        """Returns the bytes of the budget that the weights must leave free. Called before anything is loaded."""
        del parts
        return 0

    def load(self, parts: Parts) -> None:
        """Loads the wing's own models. Called after the served model and its tokenizer are loaded."""

    def plug(self, parts: Parts) -> None:
        """Sets the wing's parts of the computation of requests. Called after all weights are loaded."""

    def join(self, parts: Parts) -> None:
        """Connects the wing with the scheduler."""
