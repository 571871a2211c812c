"""Computes a segment again, and says how far what the disk has of it is off. Owner: the engine thread."""

from collections.abc import Callable, Generator
from typing import cast

import mlx.core as mx

from runner.cache.disk.point import Tokens
from runner.cache.disk.segment import Segment
from runner.cache.layer_facts import LayerFacts
from runner.cache.layers.cargo import array_of, parts
from runner.cache.layers.generic import GenericState
from runner.cache.sequence import SequenceLayers

_SLICE_TOKENS = 16  # the most that a request waits for


def recheck(
    segment: Segment,
    prefix: Tokens,
    make_layers: Callable[[], list[object]],
    forward: Callable[[mx.array, list[object]], mx.array],
) -> Generator[None, None, float]:
    """Computes `prefix`, all tokens up to the end of the segment, over fresh layers, and compares what these hold then.
    Yields after each slice: some tokens, or a layer.

    Returns the largest difference of any array of layers that are plain, as `drift` has it. Raises what the model
    raises.
    """
    sequence, tokens, stop = SequenceLayers(make_layers(), LayerFacts()), prefix.tolist(), segment.name.stop
    for at in range(0, stop, _SLICE_TOKENS):
        piece = tokens[at : at + _SLICE_TOKENS]
        forward(mx.array([piece]), sequence.layers)
        sequence.advance(len(piece))
        sequence.evaluate()
        yield
    off = 0.0
    for index, record in enumerate(segment.facts.records):
        state = sequence.states[record.slot]
        if isinstance(state, GenericState):  # its buffers may depend on the lengths of forwards
            continue
        snapshot = state.snapshot(record.start, stop)
        if snapshot is None:
            return float("inf")
        found, _ = parts(snapshot, record.start, stop)
        for part, tensor, data in zip(found, record.tensors, segment.arrays(index), strict=True):
            if (part.dtype, part.shape) != (tensor.dtype, tensor.shape):
                return float("inf")
            low, high = part.span or (0, 0)
            right = part.array if part.span is None else part.array[..., low:high, :]
            if mx.issubdtype(right.dtype, mx.floating):  # of quantized layers the scales tell
                off = max(off, drift(array_of(data, tensor.dtype, tensor.shape), right))
        snapshot.close()
        yield
    return off


def is_plain(description: str) -> bool:
    """Returns True for the description of a layer (`cargo.describe`) that holds the same of the same tokens, however
    long the forwards were."""
    return not description.startswith(f"{GenericState.__name__} ")


def drift(ours: mx.array, right: mx.array) -> float:
    """Returns the difference of most vectors on the last axis, in relation to their length: 0 means equal, about 1.4
    unrelated vectors, infinite that ours are not numbers. A few may differ: two experts may be nearly tied."""
    if not right.size:
        return 0.0
    ours, right = ours.astype(mx.float32), right.astype(mx.float32)
    error = mx.linalg.norm(ours - right, axis=-1) / mx.maximum(mx.linalg.norm(right, axis=-1), 1e-6)
    return cast("float", mx.median(mx.where(mx.isnan(error), mx.inf, error)).item())
