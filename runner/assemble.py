"""Builds an engine: prepares the device, loads the weights, and connects the parts that compute with them.

Only the engine thread imports this module, because this imports MLX.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from math import inf
from time import perf_counter

import mlx.core as mx

from runner import cpu
from runner.cache import make_cache
from runner.cache.layer_interface import MakeLayers
from runner.cache.layers.batched import unbatchable_layers
from runner.cache.layers.compiled import CompiledSteps
from runner.cache.sketch import LayerFacts, Sketch
from runner.device import device, gpu_usable_bytes, on_cuda, usable_bytes, use_on_cuda
from runner.engine.engine import World
from runner.engine.first_tokens import FirstTokens
from runner.engine.generation import Forward
from runner.engine.memory import MemoryBudget, set_limits
from runner.engine.parts import Parts, Post
from runner.engine.policy import SlicePolicy
from runner.engine.scheduler import Scheduler
from runner.errors import NO_NUMBERS, ComputeError
from runner.logs import Log, exception_line
from runner.model import OpenedModel
from runner.model.weights.dtype import in_float32
from runner.model.weights.parameters import building_only
from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sampler
from runner.settings import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, Settings
from runner.tokenizer import Tokenizer
from runner.wings import wings_of

log = Log(__name__)
_WARM_BYTES = 16 << 20  # of a model: above it, a CPU's forwards take longer than the first request saves by a warm-up
_GPU_COLUMNS = 8_192  # in compiled steps: over longer buffers, their attention was not measured


def assemble(
    settings: Settings, model: OpenedModel, opening: Future[Tokenizer], started_s: float, post: Post, world: World
) -> Parts:
    """Loads the model and builds an engine around it. Runs on the engine thread.

    `opening` is the tokenizer, which may still be opening. `started_s` is the time at which the engine began to load,
    for the log. All outside values come through `world`; if it has ranks, this process loads only its part of the
    model. Raises ModelError if the model or its tokenizer cannot be loaded.
    """
    parts = _begin(settings, model, post, world)
    wings = [*wings_of(settings)]

    weights_bytes = parts.budget_bytes - sum(wing.reserve(parts) for wing in wings)
    parts.loaded = world.load(model, settings.dtype, weights_bytes)
    parts.tokenizer = opening.result()

    for wing in wings:
        wing.load(parts)
    parts.logits, parts.make_layers = parts.loaded.logits, parts.loaded.make_layers
    world.loaded(parts)
    parts.forward = parts.logits
    parts.reuse_bytes = set_limits(parts.budget_bytes, on_cpu=parts.on_cpu)
    chunk_tokens = settings.prefill_chunk_tokens or (CPU_CHUNK_TOKENS if parts.on_cpu else GPU_CHUNK_TOKENS)
    parts.policy = SlicePolicy(chunk_tokens, settings.max_gap_s)
    if parts.shares_memory:
        parts.outside_bytes = lambda: sum(each() for each in parts.helper_bytes)
    world.wrap(parts)

    for wing in wings:
        wing.plug(parts)
    _connect(parts)
    parts.scheduler = Scheduler(parts, settings.parallel, world.turns.outbox)
    parts.warm_up = partial(_warm_up, parts, world)

    for wing in wings:
        wing.join(parts)
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
    """Prepares MLX's default device, and finds the bytes of its memory and of the budget."""
    on_cpu = device() == "cpu"
    if on_cpu:
        mx.disable_compile()  # each fused kernel would take a run of g++, and gains nothing on a CPU
    budget_bytes = settings.memory.bytes_of(usable_bytes() // (settings.ranks_here if on_cpu else 1))
    total_bytes = gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())
    if not on_cpu and mx.metal.is_available():
        mx.set_wired_limit(min(total_bytes, budget_bytes))  # keeps weights from being paged out between requests
    elif not on_cpu:
        use_on_cuda()
    parts = Parts(settings, model, post, on_cpu, *world.machine(total_bytes, budget_bytes), ranks=world.ranks)
    parts.context_length = model.context_length
    return parts


def _connect(parts: Parts) -> None:
    """Sets the memory budget, the cache, and the other core parts with which requests are computed."""
    settings, model = parts.settings, parts.model

    def drop_unused() -> None:
        for drop in parts.drop_unused:
            drop()

    parts.memory = MemoryBudget(
        parts.meter,
        parts.budget_bytes,
        parts.policy.chunk_tokens,
        parts.reuse_bytes,
        parts.outside_bytes,
        drop_unused,
        draft_bytes=parts.draft_bytes,
        one_grammar_bytes=parts.grammar_bytes,
    )
    if not model.family.is_encoder:
        with building_only(parts.loaded.module):
            parts.sketch = sketch(parts.make_layers, parts.logits, model.vocab_size, model.context_length)
    parts.make_cache = partial(
        make_cache,
        settings.cache,
        LayerFacts(parts.make_layers) if parts.sketch is None else parts.sketch.facts,
        budget_bytes=settings.cache_memory.bytes_of(parts.total_bytes),
        turn_tokens=parts.tokenizer.special,
    )
    if parts.ranks is None and settings.cache != "none":
        parts.first_tokens = FirstTokens(model.context_length)
        parts.drop_unused.append(parts.first_tokens.clear)
    parts.unbatchable = parts.loaded.unbatchable or unbatchable_layers(parts.make_layers())
    parts.scoring = partial(in_float32, parts.loaded.module)
    # Not with a tape, with ranks or with a draft model, all of which watch every forward. Macs: untried.
    plain = parts.forward is parts.logits and parts.ranks is None and parts.loaded.library is None
    if plain and not parts.unbatchable and (cpu.keeps_graphs() if parts.on_cpu else on_cuda()):
        parts.step = CompiledSteps(parts.logits, _built(parts), inf if parts.on_cpu else _GPU_COLUMNS)


def _built(parts: Parts) -> Forward:
    """Returns a forward that builds the graph of the model's logits and evaluates none of it."""

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        with building_only(parts.loaded.module):
            return parts.logits(tokens, layers)

    return forward


def _warm_up(parts: Parts, world: World) -> None:
    """Runs the forwards of a first request, and tries compiled steps on a GPU. For a large model on a CPU, the forwards
    are built but not computed."""
    model, sketch, parts.sketch = parts.model, parts.sketch, None
    assert sketch is not None
    if not parts.on_cpu:
        log.info("warming up", why="a GPU's kernels are compiled when they are first used, once on a machine")
    forward = world.forward(sketch.forward)
    if parts.on_cpu and model.total_bytes > _WARM_BYTES and not parts.loaded.has_16_bit_experts:
        for tokens in (sketch.prompt, [0]):
            forward(mx.array([tokens]), sketch.layers)  # a tape notes each forward, computed or not
    elif not warm_up(sketch, forward, model.vocab_size, model.context_length):
        log.warning("requests may fail", why=NO_NUMBERS)
    if parts.step is not None and not parts.on_cpu:
        parts.step.try_out(parts.make_layers, sketch.prompt)
        mx.clear_cache()


# The warm-up: the forwards and the sampling of a first request, before one arrives. It finds models that cannot
# compute, and makes GPUs compile their kernels.

_OPTIONS = (
    SamplingOptions(logprobs=True, top_logprobs=5),
    SamplingOptions(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, repeat_penalty=1.1, repeat_last_n=64, seed=0),
)
"""Two kinds of sampling: greedy with log-probabilities, and hosts' default options with more filters."""


def sketch(make_layers: MakeLayers, forward: Forward, vocab_size: int, context_length: int) -> Sketch:
    """Makes the sketch of a model. Raises ComputeError if its forwards cannot be built. Owner: the engine thread."""
    with _computing():
        return Sketch(make_layers, forward, vocab_size, context_length)


def warm_up(sketch: Sketch, forward: Forward, vocab_size: int, context_length: int) -> bool:
    """Computes a slice of a prompt, and a step with both kinds of sampling. The sketch cannot be used afterwards.
    `forward` is the forward of the sketch. Returns False if NaN or infinity was computed; other prompts may still
    compute numbers.

    Raises ComputeError for an error that would fail every request. Owner: the engine thread.
    """
    started = perf_counter()
    with _computing():
        mask = b"\xff" * (-(-vocab_size // 8))
        mx.eval(forward(mx.array([sketch.prompt]), sketch.layers))
        logits = forward(mx.array([[0]]), sketch.layers)
        for options in _OPTIONS:
            sample = Sampler(options, sketch.prompt, vocab_size, context_length)(logits[:, -1, :], [mask])
            mx.eval(sample.arrays())
            from_numbers = sample.read()[0].from_numbers  # NaN and infinity stay in the layers
    mx.clear_cache()
    log.debug("warmed up", seconds=round(perf_counter() - started, 3))
    return from_numbers


@contextmanager
def _computing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ComputeError(f"the model cannot compute: {exception_line(error)}") from error
