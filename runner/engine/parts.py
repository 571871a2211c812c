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
"""Has the engine thread call a function between two slices; with None it only wakes an engine that waits."""


@dataclass
class WingCounts:
    """The functions that return the numbers of wings: zeros while a wing is off."""

    media: Callable[[], MediaCounts] = MediaCounts
    drafts: Callable[[], DraftCounts] = DraftCounts
    disk: Callable[[], DiskCounts] = DiskCounts
    embeddings: Callable[[], EmbeddingCounts] = EmbeddingCounts


@dataclass
class Parts(CoreParts):
    """The parts of an engine. `runner.assemble.assemble` sets them from top to bottom, and between its steps each wing
    reads what is there, and sets or wraps what is its own. Any thread may use `tokenizer`, `vision` and `formats`; the
    rest belongs to the engine thread."""

    # When nothing is loaded.
    settings: Settings
    model: OpenedModel
    post: Post
    on_cpu: bool
    total_bytes: int
    """The memory of the device."""
    budget_bytes: int
    """The most that MLX may hold (`--memory`)."""

    # When the weights and the tokenizer are loaded.
    loaded: LoadedModel = field(init=False)

    # When the wings have loaded their own.
    logits: Forward = field(init=False)
    """The model's own forward, on all ranks together."""
    make_layers: MakeLayers = field(init=False)

    # What a tape wraps, as it does `forward`, `policy` and `begin`.
    meter: Meter = field(default_factory=Meter)
    clock: Callable[[], float] = monotonic
    """Seconds, from any beginning."""
    step_s: Callable[[float], float] = float
    """Takes the seconds that a decode step took, and returns those to learn from."""
    reuse_bytes: int = 0
    """The bytes of freed arrays that MLX keeps for reuse."""
    outside_bytes: Callable[[], int] = lambda: 0
    """Returns the bytes that other processes of this runner take from the budget."""

    # When all is connected.
    sketch: Sketch | None = None
    """Shows what the layers hold, until the model is warmed up; None for an encoder."""
    scheduler: Scheduler = field(init=False)
    warm_up: Callable[[], None] = field(init=False)
    """Computes what a first request would. Raises ComputeError if the model cannot."""

    # What wings set; off until then.
    vision: Vision = field(default_factory=NoVision)
    names: "Names | None" = None
    """The names of media in the keys of caches."""
    formats: "Formats" = field(default_factory=NoFormats)
    disk: "Tier | None" = None
    beside: "list[Beside]" = field(default_factory=list)
    """Work beside the scheduler; the tier is in it."""
    encoder_use: EncoderUse = field(default_factory=EncoderUse)
    counts: WingCounts = field(default_factory=WingCounts)
    draft_bytes: int = 0
    """The bytes that a model that drafts may hold beside its weights."""
    grammar_bytes: int = 0
    """The bytes that the grammar of an answer is likely to take of the budget, before it is compiled."""
    helper_bytes: list[Callable[[], int]] = field(default_factory=list)
    """The terms of `outside_bytes`, where processes share the device's memory."""
    drop_unused: list[Callable[[], None]] = field(default_factory=list)
    """Free memory outside the cache that no request needs now."""

    @property
    def shares_memory(self) -> bool:
        """True if the device and ordinary processes use the same memory."""
        return self.on_cpu or mx.metal.is_available()

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The bytes that MLX has in use, and keeps for reuse."""
        return mx.get_active_memory(), mx.get_cache_memory()

    @property
    def free_bytes(self) -> int:
        """The bytes that MLX may still take."""
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
    """The report of `mlx-runner check` on a wing: its fields, or the text of its line."""

    @property
    def text(self) -> str:
        raise NotImplementedError

    @property
    def is_fault(self) -> bool:
        """True if `check` has failed for it, although the model would load."""
        return False


class Wing:
    """A capability beside the core, which joins an engine while it is built. A step may do nothing; an exception in one
    ends the start."""

    name: ClassVar[str]
    """That of its folder."""

    def tensors(self, model: OpenedModel) -> Iterable[LogicalTensor]:
        """Returns the tensors of a model's files that it reads, beside those of the text model."""
        del model
        return ()

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        """Returns the facts for `mlx-runner check`, by the fields of its report. `found` is None if the model would not
        load. Raises ModelError for a fault that would end the start."""
        del settings, found
        return {}

    def reserve(self, parts: Parts) -> int:
        """Returns the bytes of the budget that loading the weights should leave. Nothing is loaded yet."""
        del parts
        return 0

    def load(self, parts: Parts) -> None:
        """Loads its own models. The model and its tokenizer are loaded."""

    def plug(self, parts: Parts) -> None:
        """Sets its parts of the computation of requests. All weights are loaded."""

    def join(self, parts: Parts) -> None:
        """Connects itself with the scheduler."""
