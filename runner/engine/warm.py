"""The forwards and the sampling of a first request, before there is one: GPUs make kernels when they are first used."""

from collections.abc import Callable
from time import perf_counter

import mlx.core as mx

from runner.engine.generation import Forward
from runner.logs import Log, told
from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sampler

log = Log(__name__)
_TOKENS = 16
_OPTIONS = (
    SamplingOptions(logprobs=True, top_logprobs=5),
    SamplingOptions(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, repeat_penalty=1.1, repeat_last_n=64, seed=0),
)
"""Greedy with all that can be asked about a token, and with what hosts send by default and more."""


def warm_up(
    make_layers: Callable[[], list[object]],
    forward: Forward,
    vocab_size: int,
    context_length: int,
    trial: Callable[[], object] = lambda: None,
) -> None:
    """A slice of a prompt, and a step with each kind of sampling, on layers that nobody keeps; then a `trial`.

    Never raises: whatever a request would meet, it meets itself, and can be told. Owner: the engine thread.
    """
    started = perf_counter()
    try:
        prompt = [token * vocab_size // _TOKENS for token in range(min(_TOKENS, context_length))]
        layers, mask = make_layers(), b"\xff" * (-(-vocab_size // 8))
        logits = forward(mx.array([prompt]), layers)
        mx.eval(logits)
        for options in _OPTIONS:
            logits = forward(mx.array([[0]]), layers)
            mx.eval(Sampler(options, prompt, vocab_size, context_length)(logits[:, -1, :], [mask]).arrays())
        trial()
    except Exception as error:
        log.warning("the model could not be warmed up", reason=told(error))
    finally:
        mx.clear_cache()
    log.debug("warmed up", seconds=round(perf_counter() - started, 3))
