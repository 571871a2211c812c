"""Checks 1 of 64 restores: a part of it is computed again while the engine is idle. Owner: the engine thread.

The name of the directory covers everything that is known to shape keys and values. This finds what is not known: a
driver or a library that computes something else than it did, and answers that would be plausible nonsense.
"""

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import cast

import mlx.core as mx

from runner.cache.layers import distrust
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.states import GenericState
from runner.cache.sequence import LayerFacts, SequenceLayers
from runner.cache.trie_cache import TrieCache
from runner.disk.reader import Found
from runner.disk.segment import Form, Layers, Segment, Tensor, Tokens
from runner.disk.serialize import SerializeError, array_of, describe, kind_of, parts
from runner.disk.thread import DiskThread
from runner.logs import Log, error_line
from runner.model.weights.dtype import Forward

log = Log(__name__)

_SLICE_TOKENS = 16  # a request that arrives waits for this forward
_MORE_TOKENS, _SHORT_S = 112, 0.02
"""A forward that takes less says little of the time of a token: one over more tokens is timed."""


class Sample:
    """A short forward over fresh layers. Its graph alone, built in milliseconds whatever the size of the model, shows
    what layers hold; it is computed only to learn how long that takes."""

    def __init__(self, make_layers: Callable[[], list[object]], forward: Forward):
        """`forward` takes tokens [1, L] and a cache list to logits. Raises what it raises."""
        sequence = SequenceLayers(make_layers(), LayerFacts())
        self._forward = forward
        self._sequence = sequence
        self._logits = forward(mx.arange(_SLICE_TOKENS)[None], sequence.layers)
        sequence.advance(_SLICE_TOKENS)
        self.layers: Layers = {}
        """The forms that segments of this model must have; empty if no file can hold its layers."""
        with suppress(SerializeError):
            self.layers = {
                str(slot): (_form(state), _form(distrust(state, _SLICE_TOKENS))) for slot, state in sequence.used
            }

    def token_s(self, clock: Callable[[], float]) -> float:
        """Returns the seconds that computing a token takes. Call it once. Raises what MLX raises."""
        began_s = clock()
        mx.eval(self._logits)
        seconds, count = clock() - began_s, _SLICE_TOKENS
        if seconds < _SHORT_S:
            began_s = clock()
            mx.eval(self._forward(mx.arange(_MORE_TOKENS)[None], self._sequence.layers))
            seconds, count = clock() - began_s, _MORE_TOKENS
        return seconds / count


def _form(state: LayerState) -> Form:
    snapshot = state.snapshot(0, _SLICE_TOKENS)
    if snapshot is None:
        raise SerializeError("nothing")
    found, content = parts(snapshot, snapshot.start, _SLICE_TOKENS)
    snapshot.close()
    tensors = tuple(Tensor(part.dtype, part.shape) for part in found)
    return Form(kind_of(state), describe(state), tensors, content, isinstance(state, GenericState))


def verify_segment(
    segment: Segment,
    prefix: Tokens,
    make_layers: Callable[[], list[object]],
    forward: Forward,
) -> Generator[None, None, float]:
    """Computes `prefix`, all tokens up to the end of the segment, over fresh layers, and compares these with it. Yields
    after each slice of tokens, then after each layer.

    Returns the largest `relative_error` of any array. Layers that the adapters do not know are left out: their
    buffers may depend on the lengths of forwards. Raises what the model raises.
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
        if isinstance(state, GenericState):
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
            if mx.issubdtype(right.dtype, mx.floating):  # of quantized layers, the scales are compared
                off = max(off, relative_error(array_of(data, tensor.dtype, tensor.shape), right))
        snapshot.close()
        yield
    return off


def relative_error(ours: mx.array, right: mx.array) -> float:
    """Returns the median difference of vectors on the last axis, in relation to their length: 0 means equal, about 1.4
    unrelated vectors, infinite that ours are not numbers. The median, as two experts may be nearly tied."""
    if not right.size:
        return 0.0
    ours, right = ours.astype(mx.float32), right.astype(mx.float32)
    error = mx.linalg.norm(ours - right, axis=-1) / mx.maximum(mx.linalg.norm(right, axis=-1), 1e-6)
    return cast("float", mx.median(mx.where(mx.isnan(error), mx.inf, error)).item())


_SHARE = 1 / 64
"""Of the restored requests."""
_MOST_TOKENS, _MOST_BYTES = 2048, 32 << 20
"""The longest prefix that is computed again, and the largest segment that is kept for it."""
_MOST_TRIES = 3
_LIMIT = 0.5
"""The largest error that is taken for rounding. Other forward boundaries cost up to 0.1 in bfloat16; vectors of other
positions or heads are off by 1 and more."""


class SelfCheck:
    """Computes one segment at a time, slice by slice. If it is not what was restored, the files of this model and all
    that is cached are dropped."""

    def __init__(
        self,
        cache: TrieCache,
        disk: DiskThread,
        make_layers: Callable[[], list[object]],
        forward: Forward,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`forward` takes tokens [1, L] and a cache list to logits; `chance` returns a random number from 0 to 1."""
        self.count = 0
        """The segments compared so far."""
        self.failures = 0
        """Those of them that were wrong."""
        self._cache = cache
        self._disk = disk
        self._make_layers = make_layers
        self._forward = forward
        self._chance = chance
        self._found: Found | None = None
        self._slices: Iterator[None] | None = None
        self._tries = 0

    @property
    def pending(self) -> bool:
        """True if there is something to compute when the engine is idle."""
        return self._found is not None

    @staticmethod
    def suits(found: Found) -> bool:
        """Returns True for a segment that can be checked: of text, short and small enough, with a layer that
        `verify_segment` compares."""
        facts, data = found.segment
        if facts.name.stop > _MOST_TOKENS or len(data) > _MOST_BYTES or min(found.prefix, default=-1) < 0:
            return False
        described = [facts.layers[str(record.slot)] for record in facts.records]
        return any(not each.startswith(f"{GenericState.__name__} ") for each in described)

    def sample(self, found: Found) -> None:
        """Considers a restored segment that suits; keeps 1 of 64."""
        if self._found is None and self._chance() < _SHARE:
            self._found = found
            self._tries = 0

    def give_way(self) -> None:
        """Frees the layers, as a request has arrived. The check begins again later, three times at most."""
        if self._slices is None:
            return
        self._drop_layers()
        self._tries += 1
        if self._tries == _MOST_TRIES:
            self._found = None

    def advance(self) -> None:
        """Computes one slice. The engine is idle."""
        if self._slices is None and self._found is not None:
            self._slices = self._check(self._found)
        if self._slices is not None and next(self._slices, self) is self:
            self._found = None
            self._drop_layers()

    def _check(self, found: Found) -> Iterator[None]:
        name, bound = found.segment.name, self._cache.budget_bytes
        if bound is not None and self._cache.nbytes + self._cache.session_bytes(name.stop) > bound:
            return  # nothing is evicted for this
        try:
            error = yield from verify_segment(found.segment, found.prefix, self._make_layers, self._forward)
        except Exception as fault:  # models raise anything; a request would have met it, too
            log.warning("the disk cache cannot be checked", why=error_line(fault))
            return
        self.count += 1
        if error <= _LIMIT:
            return
        self.failures += 1
        why = "what it holds is not what this machine computes"
        log.warning("the disk cache is wrong: emptied", difference=round(error, 2), file=name.file, why=why)
        self._disk.empty()
        self._cache.detach()

    def _drop_layers(self) -> None:
        self._slices = None
        mx.clear_cache()
