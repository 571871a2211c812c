"""The warm-up: the forwards and the sampling of a first request, before there is one. It finds models that cannot
compute, and GPUs compile their kernels in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import mlx.core as mx

from runner.engine.generation import Forward
from runner.errors import ComputeError
from runner.logs import Log, error_line
from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sampler

log = Log(__name__)
_TOKENS = 16
_OPTIONS = (
    SamplingOptions(logprobs=True, top_logprobs=5),
    SamplingOptions(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, repeat_penalty=1.1, repeat_last_n=64, seed=0),
)
"""Greedy with log-probabilities, and the default options of hosts with more filters."""


def warm_up(
    make_layers: Callable[[], list[object]],
    forward: Forward,
    vocab_size: int,
    context_length: int,
) -> None:
    """Computes a slice of a prompt, and a step with each kind of sampling, on temporary layers.

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
            mx.eval(Sampler(options, prompt, vocab_size, context_length)(logits[:, -1, :], [mask]).arrays())
    mx.clear_cache()
    log.debug("warmed up", seconds=round(perf_counter() - started, 3))


def sketch(make_layers: Callable[[], list[object]], forward: Forward, vocab_size: int, context_length: int) -> None:
    """Builds the same forwards without computing them, in milliseconds, whatever the size of the model.

    Raises ComputeError for shapes that do not fit and values that the model cannot compute with. Owner: the engine
    thread.
    """
    with _computing():
        layers = make_layers()
        for tokens in (_prompt(vocab_size, context_length), [0]):
            forward(mx.array([tokens]), layers)


def _prompt(vocab_size: int, context_length: int) -> list[int]:
    return [token * vocab_size // _TOKENS for token in range(min(_TOKENS, context_length))]


@contextmanager
def _computing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ComputeError(f"the model cannot compute: {error_line(error)}") from error
