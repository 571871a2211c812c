"""Builds an engine: opens the device, loads the weights, and connects all that computes with them.

Importing this module imports MLX, so only the engine thread does, once it runs.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple

import mlx.core as mx

from runner import __version__
from runner.cache import PrefixCache, make_cache
from runner.cache.layers.batch import unbatchable_layers
from runner.cache.sequence import LayerFacts, measured
from runner.engine.context import EngineContext
from runner.engine.events import Outbox
from runner.engine.first_tokens import FirstTokens
from runner.engine.generation import Forward
from runner.engine.memory import MemoryBudget, MLXMeter, set_limits
from runner.engine.parts import Parts, Post, Sources, Wing, World
from runner.engine.policy import SlicePolicy
from runner.engine.report import Identity, Report
from runner.engine.scheduler import Scheduler
from runner.errors import NO_NUMBERS, ComputeError
from runner.logs import Log, error_line
from runner.model import OpenedModel
from runner.model.attention import use_on_cuda
from runner.model.device import gpu_usable_bytes, usable_bytes
from runner.model.weights.dtype import device, in_float32
from runner.model.weights.load import LoadedModel, load
from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sampler
from runner.settings import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, CheckSettings, Settings
from runner.tokenizer import Tokenizer

log = Log(__name__)
_WARM_BYTES = 256 << 20  # on a CPU, a larger model's own forwards take so long that the extra of the first is nothing
MakeLayers = Callable[[], list[object]]


def wings_of(settings: Settings | CheckSettings) -> Iterator[Wing]:
    """Yields the wings that an engine with these settings has, in the order in which they load.

    These lines are all that the core's side knows of them: a wing that goes takes its folder and its lines here.
    """
    from runner.drafts.wing import DraftsWing

    yield DraftsWing()
    from runner.media.wing import MediaWing

    yield MediaWing()
    from runner.grammar.wing import GrammarWing

    yield GrammarWing()
    from runner.embeddings.wing import EmbeddingsWing

    yield EmbeddingsWing()
    if settings.disk_cache is not None:
        from runner.disk.tier import DiskWing

        yield DiskWing()


def assemble(
    settings: Settings,
    model: OpenedModel,
    opening: Future[Tokenizer],
    outbox: Outbox,
    started_s: float,
    post: Post,
    world: World,
) -> Parts:
    """Loads the model and builds an engine around it. Runs on the engine thread.

    `opening` gives the tokenizer; `started_s` is when the engine began to load, for the log. All that comes from
    outside comes through the `world`; with its ranks this process loads its part of the model. Raises ModelError if the
    model or its tokenizer cannot be loaded.
    """
    parts = _begin(settings, model, post, world)
    wings = [*wings_of(settings)]

    weights_bytes = parts.budget_bytes - sum(wing.reserve(parts) for wing in wings)
    group = world.ranks.group if world.ranks is not None else None
    parts.loaded = load(model, settings.dtype, weights_bytes, group=group)
    parts.tokenizer = opening.result()

    for wing in wings:
        wing.load(parts)
    loaded = world.loaded(parts.total_bytes, parts.budget_bytes, parts.loaded.logits)
    parts.total_bytes, parts.budget_bytes, forward = loaded
    kv_bits = None if model.family.is_encoder else settings.kv_bits
    parts.make_layers, parts.salt = _choose_kv_format(parts.loaded, forward, model.vocab_size, kv_bits)
    reuse_bytes = set_limits(parts.budget_bytes, on_cpu=parts.on_cpu)
    chunk_tokens = settings.prefill_chunk_tokens or (CPU_CHUNK_TOKENS if parts.on_cpu else GPU_CHUNK_TOKENS)
    policy = SlicePolicy(chunk_tokens, settings.max_gap_s)
    helper_bytes = (lambda: sum(each() for each in parts.helper_bytes)) if parts.shares_memory else (lambda: 0)
    parts.sources = world.wrap(Sources(forward, MLXMeter(), monotonic, policy, reuse_bytes, helper_bytes))
    parts.forward = parts.sources.forward

    for wing in wings:
        wing.plug(parts)
    parts.scheduler = Scheduler(_context(parts, chunk_tokens), parts.sources.policy, settings.parallel, outbox)
    parts.warm_up = _warm_up_of(parts)

    for wing in wings:
        wing.join(parts)
    if world.ranks is not None:
        parts.counts.ranks = world.ranks.counts
    identity = Identity(
        version=__version__,
        model=model.title,
        path=model.directory,
        architecture=model.architecture,
        device=device(),
        context_length=model.context_length,
        parallel=parts.scheduler.parallel,
        cache_kind=settings.cache,
    )
    shown = parts.tokenizer if settings.inspect_text else None
    parts.report = Report(identity, parts.scheduler, shown, parts.counts)
    log.info(
        "model loaded",
        model=model.name,
        architecture=model.architecture,
        bytes=model.total_bytes,
        seconds=round(perf_counter() - started_s, 3),
        device=device(),
        context=model.context_length,
        cache=settings.cache,
        cache_bytes=settings.cache_memory.bytes_of(parts.total_bytes),
        memory_bytes=parts.budget_bytes,
        parallel=parts.scheduler.parallel,
    )
    return parts


def _begin(settings: Settings, model: OpenedModel, post: Post, world: World) -> Parts:
    """Prepares MLX's default device, and finds how much memory it offers."""
    on_cpu = device() == "cpu"
    if on_cpu:
        mx.disable_compile()  # every fused kernel would cost a run of g++, and gains nothing on CPUs
    budget_bytes = settings.memory.bytes_of(usable_bytes() // (settings.ranks_here if on_cpu else 1))
    total_bytes = gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())
    if not on_cpu and mx.metal.is_available():
        mx.set_wired_limit(min(total_bytes, budget_bytes))  # lest weights are paged out between two requests
    elif not on_cpu:
        use_on_cuda()
    total_bytes, budget_bytes = world.machine(total_bytes, budget_bytes)
    return Parts(settings, model, world, post, on_cpu, total_bytes, budget_bytes)


def _choose_kv_format(
    loaded: LoadedModel, logits: Forward, vocab_size: int, kv_bits: int | None
) -> tuple[MakeLayers, str]:
    """Returns the function that makes a sequence's layers, and the name of the format that they keep keys and values
    in: empty if they are not quantized."""
    if kv_bits is None:
        return loaded.make_layers, ""
    from runner.cache.layers.quantized_trial import find_format

    return find_format(loaded.make_layers, logits, vocab_size, kv_bits)


def _context(parts: Parts, chunk_tokens: int) -> EngineContext:
    settings, sources = parts.settings, parts.sources
    cache_bytes = settings.cache_memory.bytes_of(parts.total_bytes)

    def new_cache() -> PrefixCache:
        return make_cache(
            settings.cache,
            parts.make_layers,
            budget_bytes=cache_bytes,
            turn_tokens=parts.tokenizer.special,
        )

    def drop_unused() -> None:
        for drop in parts.drop_unused:
            drop()

    memory = MemoryBudget(
        sources.meter,
        parts.budget_bytes,
        chunk_tokens,
        sources.reuse_bytes,
        sources.grammar_bytes,
        drop_unused,
        draft_bytes=parts.draft_bytes,
        one_grammar_bytes=parts.grammar_bytes,
    )
    first_tokens = FirstTokens(parts.model.context_length)
    parts.drop_unused.append(first_tokens.clear)
    return EngineContext(
        forward=parts.forward,
        tokenizer=parts.tokenizer,
        context_length=parts.model.context_length,
        make_cache=new_cache,
        memory=memory,
        salt=parts.salt,
        show=parts.show,
        shifted=parts.shifted,
        unbatchable=parts.loaded.unbatchable or unbatchable_layers(parts.make_layers()),
        drafter=parts.drafter,
        rounds=parts.rounds,
        begin=sources.begin,
        ranks=parts.world.ranks,
        first_tokens=first_tokens if parts.world.ranks is None and settings.cache != "none" else None,
        scoring=partial(in_float32, parts.loaded.module),
    )


def _warm_up_of(parts: Parts) -> Callable[[], None]:
    """Returns the forwards to run before the first request. A large model on a CPU only builds its graphs."""
    model, on_cpu = parts.model, parts.on_cpu
    only_sketch = on_cpu and model.total_bytes > _WARM_BYTES and not parts.loaded.has_16_bit_experts
    compute = sketch if only_sketch else warm_up

    def warm() -> None:
        if not on_cpu:
            log.info("warming up", why="a GPU's kernels are compiled when they are first used, once on a machine")
        facts, from_numbers = compute(parts.make_layers, parts.sources.forward, model.vocab_size, model.context_length)
        parts.scheduler.memory.session_bytes = facts.bytes_of
        if not from_numbers:
            log.warning("requests may fail", why=NO_NUMBERS)

    return warm


# --- The warm-up: the forwards and the sampling of a first request, before there is one. It finds models that cannot
# compute, and GPUs compile their kernels in it.

_TOKENS = 16
_OPTIONS = (
    SamplingOptions(logprobs=True, top_logprobs=5),
    SamplingOptions(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, repeat_penalty=1.1, repeat_last_n=64, seed=0),
)
"""Greedy with log-probabilities, and the default options of hosts with more filters."""


class WarmUp(NamedTuple):
    """The findings of the warm-up."""

    facts: LayerFacts
    """Those of the layers."""
    from_numbers: bool = True
    """False if NaN or infinity was computed, as with other prompts it need not be."""


def warm_up(
    make_layers: Callable[[], list[object]],
    forward: Forward,
    vocab_size: int,
    context_length: int,
) -> WarmUp:
    """Computes a slice of a prompt, and a step with each kind of sampling, on temporary layers. Returns what these
    show.

    Raises ComputeError for an error that would fail every request. Owner: the engine thread.
    """
    started = perf_counter()
    with _computing():
        prompt = _prompt(vocab_size, context_length)
        layers, mask = make_layers(), b"\xff" * (-(-vocab_size // 8))
        logits = forward(mx.array([prompt]), layers)
        mx.eval(logits)
        for options in _OPTIONS:
            logits = forward(mx.array([[0]]), layers)
            sample = Sampler(options, prompt, vocab_size, context_length)(logits[:, -1, :], [mask])
            mx.eval(sample.arrays())
            from_numbers = sample.read()[0].from_numbers  # NaN and infinity stay in the layers
    mx.clear_cache()
    log.debug("warmed up", seconds=round(perf_counter() - started, 3))
    return WarmUp(measured(layers, len(prompt) + len(_OPTIONS)), from_numbers)


def sketch(make_layers: Callable[[], list[object]], forward: Forward, vocab_size: int, context_length: int) -> WarmUp:
    """Builds the same forwards without computing them, in milliseconds, whatever the size of the model. Returns what
    the layers show all the same.

    Raises ComputeError for shapes that do not fit and values that the model cannot compute with. Owner: the engine
    thread.
    """
    with _computing():
        layers, prompt = make_layers(), _prompt(vocab_size, context_length)
        for tokens in (prompt, [0]):
            forward(mx.array([tokens]), layers)
    return WarmUp(measured(layers, len(prompt) + 1))


def _prompt(vocab_size: int, context_length: int) -> list[int]:
    return [token * vocab_size // _TOKENS for token in range(min(_TOKENS, context_length))]


@contextmanager
def _computing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ComputeError(f"the model cannot compute: {error_line(error)}") from error
