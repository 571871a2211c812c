"""Builds the parts of an engine: opens the device, loads the weights, and connects all that computes with them.

Importing this module imports MLX, so only the engine thread does, once it runs.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from runner import __version__, blas
from runner.cache import PrefixCache, make_cache
from runner.cache.layers.batch import unbatchable_layers
from runner.drafts.drafting import Drafting
from runner.drafts.opening import DraftModelOpener
from runner.drafts.pacing import DraftModel
from runner.drafts.policy import DraftPolicy
from runner.engine.context import EngineContext
from runner.engine.engine import Assembly
from runner.engine.events import Outbox
from runner.engine.generation import Forward
from runner.engine.memory import MemoryBudget, MLXMeter, set_limits
from runner.engine.policy import SlicePolicy
from runner.engine.report import Identity, Report, WingCounts
from runner.engine.scheduler import Scheduler
from runner.engine.warmup import sketch, warm_up
from runner.engine.world import Sources, World
from runner.grammar.formats import GRAMMAR_BYTES, Formats
from runner.logs import Log
from runner.model import OpenedModel
from runner.model.device import gpu_usable_bytes, usable_bytes
from runner.model.weights.dtype import device, in_float32
from runner.model.weights.load import LoadedModel, load
from runner.pictures.sight import Sight
from runner.settings import CPU_CHUNK_TOKENS, DRAFT_OFF, GPU_CHUNK_TOKENS, Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.disk.tier import DiskTier

log = Log(__name__)
_WARM_BYTES = 256 << 20  # on a CPU, a larger model's own forwards take so long that the extra of the first is nothing
MakeLayers = Callable[[], list[object]]


class _Device(NamedTuple):
    on_cpu: bool
    total_bytes: int
    budget_bytes: int
    """The most that MLX may hold (`--memory`)."""

    @property
    def shares_memory(self) -> bool:
        """True if the device and ordinary processes use the same memory."""
        return self.on_cpu or mx.metal.is_available()


def assemble(
    settings: Settings,
    model: OpenedModel,
    opening: Future[Tokenizer],
    outbox: Outbox,
    started_s: float,
    post: Callable[[Callable[[], None] | None], None],
    world: World,
) -> Assembly:
    """Loads the model and builds an engine around it. Runs on the engine thread.

    `opening` gives the tokenizer; `started_s` is when the engine began to load, for the log; `post` calls a function
    between two slices, and with None only wakes an engine that waits. All that comes from outside comes through the
    `world`; with its ranks this process loads its part of the model. Raises ModelError if the model or its tokenizer
    cannot be loaded.
    """
    opened, ranks = _open_device(settings), world.ranks
    opened = _Device(opened.on_cpu, *world.machine(opened.total_bytes, opened.budget_bytes))
    slow_blas = blas.detect(settings.blas).is_slow
    drafts = DraftModelOpener(settings, model) if ranks is None else None
    weights_bytes = opened.budget_bytes - (drafts.reserved_bytes(opened.budget_bytes) if drafts else 0)
    group = ranks.group if ranks is not None else None
    loaded = load(model, settings.dtype, weights_bytes, slow_blas=slow_blas, group=group)
    tokenizer = opening.result()
    draft_model = drafts.load(loaded, tokenizer, opened.budget_bytes, slow_blas=slow_blas) if drafts else None
    total_bytes, budget_bytes, logits = world.loaded(opened.total_bytes, opened.budget_bytes, loaded.logits)
    opened = _Device(opened.on_cpu, total_bytes, budget_bytes)
    sight = Sight()
    if model.has_vision and ranks is None:
        from runner.pictures.open import open_sight  # no other model needs it

        sight = open_sight(
            model,
            loaded,
            tokenizer,
            settings,
            opened.budget_bytes - mx.get_active_memory(),
            lambda: post(None),
            slow_blas=slow_blas,
        )
    make_layers, salt = _choose_kv_format(loaded, logits, model.vocab_size, settings.kv_bits)
    cache_bytes = settings.cache_memory.bytes_of(opened.total_bytes)
    chunk_tokens = settings.prefill_chunk_tokens or (CPU_CHUNK_TOKENS if opened.on_cpu else GPU_CHUNK_TOKENS)

    def new_cache() -> PrefixCache:
        return make_cache(
            settings.cache,
            make_layers,
            budget_bytes=cache_bytes,
            turn_tokens=tokenizer.special,
            known_choices=settings.draft_known,
        )

    reuse_bytes = set_limits(opened.budget_bytes, on_cpu=opened.on_cpu)
    formats = Formats(model, tokenizer, settings.parallel, opened.budget_bytes - mx.get_active_memory())
    if opened.shares_memory:
        sight.bound(opened.budget_bytes - mx.get_active_memory())
    grammar_bytes = (lambda: formats.nbytes + sight.nbytes) if opened.shares_memory else (lambda: 0)

    def drop_unused() -> None:
        sight.drop_features()
        if opened.shares_memory:
            formats.end_kept()

    policy = SlicePolicy(chunk_tokens, settings.max_gap_s)
    sources = world.wrap(Sources(logits, MLXMeter(), monotonic, policy, reuse_bytes, grammar_bytes))
    logits = sources.forward
    drafting = _drafting(settings, loaded.undraftable, salt, draft_model, sources.clock, on_cpu=opened.on_cpu)
    context = EngineContext(
        forward=logits if draft_model is None else draft_model.watch(logits),
        tokenizer=tokenizer,
        context_length=model.context_length,
        make_cache=new_cache,
        memory=MemoryBudget(
            sources.meter,
            opened.budget_bytes,
            chunk_tokens,
            sources.reuse_bytes,
            sources.grammar_bytes,
            drop_unused,
        ),
        salt=salt,
        unbatchable=loaded.unbatchable or unbatchable_layers(make_layers()),
        drafting=drafting,
        begin=sources.begin,
        ranks=ranks,
        scoring=partial(in_float32, loaded.module),
    )
    if sight.encoder is not None:
        context = context._replace(show=sight.encoder.begin, shifted=sight.encoder.shifted)
    context.memory.draft_bytes = draft_model.most_bytes if draft_model is not None else 0
    context.memory.grammar_bytes = GRAMMAR_BYTES if opened.shares_memory else 0
    scheduler = Scheduler(context, sources.policy, settings.parallel, outbox)
    identity = Identity(__version__, model.name, model.architecture, device(), model.context_length, settings.cache)
    shown = tokenizer if settings.inspect_text else None
    disk = None
    if settings.disk_cache is not None:
        disk = _open_disk(settings, model, loaded, make_layers, sight, scheduler, salt, post)
    wings = WingCounts()
    if sight.encoder is not None:
        wings = wings._replace(pictures=sight.encoder.counts)
    if drafting is not None:
        wings = wings._replace(drafts=drafting.counts)
    if disk is not None:
        wings = wings._replace(disk=disk.counts)
    if ranks is not None:
        wings = wings._replace(ranks=ranks.counts)
    report = Report(identity, scheduler, context.memory, shown, wings)
    log.info(
        "model loaded",
        model=model.name,
        architecture=model.architecture,
        bytes=model.total_bytes,
        seconds=round(perf_counter() - started_s, 3),
        device=device(),
        context=model.context_length,
        cache=settings.cache,
        cache_bytes=cache_bytes,
        memory_bytes=opened.budget_bytes,
        parallel=scheduler.parallel,
    )
    warm = _warm_up_of(model, loaded, logits, make_layers, on_cpu=opened.on_cpu)
    return Assembly(scheduler, report, tokenizer, sight.vision, formats, warm, disk)


def _open_device(settings: Settings) -> _Device:
    """Prepares MLX's default device, and finds how much memory it offers."""
    on_cpu = device() == "cpu"
    if on_cpu:
        mx.disable_compile()  # every fused kernel would cost a run of g++, and gains nothing on CPUs
    budget_bytes = settings.memory.bytes_of(usable_bytes() // (settings.ranks_here if on_cpu else 1))
    total_bytes = gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())
    if not on_cpu and mx.metal.is_available():
        mx.set_wired_limit(min(total_bytes, budget_bytes))  # lest weights are paged out between two requests
    return _Device(on_cpu, total_bytes, budget_bytes)


def _choose_kv_format(
    loaded: LoadedModel, logits: Forward, vocab_size: int, kv_bits: int | None
) -> tuple[MakeLayers, str]:
    """Returns the function that makes a sequence's layers, and the name of the format that they keep keys and values
    in: empty if they are not quantized."""
    if kv_bits is None:
        return loaded.make_layers, ""
    from runner.cache.layers.quantized_trial import find_format

    return find_format(loaded.make_layers, logits, vocab_size, kv_bits)


def _drafting(
    settings: Settings,
    undraftable: str,
    salt: str,
    model: DraftModel | None,
    clock: Callable[[], float],
    *,
    on_cpu: bool,
) -> Drafting | None:
    if settings.draft == DRAFT_OFF:
        return None
    if undraftable:
        log.info("answers are not drafted", why=undraftable)
    make = DraftPolicy.for_cpu if on_cpu else DraftPolicy.for_gpu
    policy = make(settings.draft_tokens) if settings.draft_tokens else make()
    return Drafting(policy, undraftable, salt, model, clock)


def _open_disk(
    settings: Settings,
    model: OpenedModel,
    loaded: LoadedModel,
    make_layers: MakeLayers,
    sight: Sight,
    scheduler: Scheduler,
    salt: str,
    post: Callable[[Callable[[], None] | None], None],
) -> "DiskTier | None":
    from runner.disk.open import open_tier  # nothing of it is imported without the flag

    return open_tier(settings, model, make_layers, loaded.dtypes, loaded.logits, sight.names, scheduler, salt, post)


def _warm_up_of(
    model: OpenedModel, loaded: LoadedModel, logits: Forward, make_layers: MakeLayers, *, on_cpu: bool
) -> Callable[[], None]:
    """Returns the forwards to run before the first request. A large model on a CPU only builds its graphs."""
    only_sketch = on_cpu and model.total_bytes > _WARM_BYTES and not loaded.has_16_bit_experts
    compute = sketch if only_sketch else warm_up

    def warm() -> None:
        if not on_cpu:
            log.info("warming up", why="a GPU's kernels are compiled when they are first used, once on a machine")
        compute(make_layers, logits, model.vocab_size, model.context_length)

    return warm
