"""Checks now and then what was restored: a part of it is computed again while the engine is idle.

The name of the directory says everything that is known to shape keys and values. This finds what is not known: a
driver or a library that computes something else than it did, and answers that would be plausible nonsense. Owner: the
engine thread.
"""

import random
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import cast

import mlx.core as mx

from runner.cache.layer_interface import LayerState
from runner.cache.layers import distrust
from runner.cache.layers.states import GenericState
from runner.cache.sequence import LayerFacts, SequenceLayers
from runner.cache.trie_cache import TrieCache
from runner.disk.reader import Found
from runner.disk.segment import ENTRIES, STATE, TAIL, Form, Layers, Segment, Tensor, Tokens
from runner.disk.serialize import CargoError, array_of, describe, is_tail, parts
from runner.disk.thread import DiskThread
from runner.logs import Log, error_line

log = Log(__name__)

# --- Forwards over fresh layers: what a model leaves in them, and how far off what the disk has of a segment is.
# Owner: the engine thread.

_SLICE_TOKENS = 16  # the most that a request waits for
_MORE_TOKENS, _SHORT_S = 112, 0.02
"""A forward that takes less says little of the time of a token: one over more tokens is timed."""


class Sample:
    """A short forward. Its graph alone, built in milliseconds whatever the size of the model, shows what layers hold;
    it is computed only to learn how long that takes."""

    def __init__(self, make_layers: Callable[[], list[object]], forward: Callable[[mx.array, list[object]], mx.array]):
        """`forward` takes tokens [1, L] and a cache list to logits. Raises what it raises."""
        sequence = SequenceLayers(make_layers(), LayerFacts())
        self._forward, self._sequence = forward, sequence
        self._logits = forward(mx.arange(_SLICE_TOKENS)[None], sequence.layers)
        sequence.advance(_SLICE_TOKENS)
        self.layers: Layers = {}
        """What a segment of this model must hold; nothing if no file can hold it."""
        with suppress(CargoError):
            self.layers = {
                str(slot): (_form(state), _form(distrust(state, _SLICE_TOKENS))) for slot, state in sequence.used
            }

    def token_s(self, clock: Callable[[], float]) -> float:
        """Returns the seconds that a token takes, once. Raises what MLX raises."""
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
        raise CargoError("nothing")
    found, content = parts(snapshot, snapshot.start, _SLICE_TOKENS)
    snapshot.close()
    kind = ENTRIES if state.sliceable else TAIL if is_tail(state) else STATE
    tensors = tuple(Tensor(part.dtype, part.shape) for part in found)
    return Form(kind, describe(state), tensors, content, isinstance(state, GenericState))


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


_SHARE = 1 / 64
"""Of the restored requests."""
_MOST_TOKENS, _MOST_BYTES = 2048, 32 << 20
"""The longest prefix that is computed again, and the largest segment that is kept for it."""
_MOST_TRIES = 3
_LIMIT = 0.5
"""The largest difference that is taken for rounding. Other forward boundaries cost up to 0.1 in bfloat16; vectors of
other positions or heads are off by 1 and more."""


class SelfCheck:
    """Computes one segment at a time, slice by slice. If it is not what was restored, the files of this model and all
    that is cached are dropped."""

    def __init__(
        self,
        disk: DiskThread,
        make_layers: Callable[[], list[object]],
        forward: Callable[[mx.array, list[object]], mx.array],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`forward` takes tokens [1, L] and a cache list to logits; `chance` returns a random number from 0 to 1."""
        self.count = self.failures = 0
        """The segments compared so far, and those of them that were wrong."""
        self._disk, self._make_layers, self._forward, self._chance = disk, make_layers, forward, chance
        self._found: Found | None = None
        self._slices: Generator[None, None, float] | None = None
        self._tries = 0

    @property
    def pending(self) -> bool:
        """True if there is something to compute when the engine is idle."""
        return self._found is not None

    @staticmethod
    def suits(found: Found) -> bool:
        """Returns True for a segment that can be checked: of text, short and small enough, and of layers that hold the
        same however long the forwards were."""
        facts, data = found.segment
        if facts.name.stop > _MOST_TOKENS or len(data) > _MOST_BYTES or min(found.prefix, default=-1) < 0:
            return False
        return any(is_plain(facts.layers[str(record.slot)]) for record in facts.records)

    def sample(self, found: Found) -> None:
        """Learns of a restored segment that suits; most are let go."""
        if self._found is None and self._chance() < _SHARE:
            self._found, self._tries = found, 0

    def give_way(self) -> None:
        """Frees the layers, as a request has arrived. The check begins again later, but not forever."""
        if self._slices is None:
            return
        self._drop_layers()
        self._tries += 1
        if self._tries == _MOST_TRIES:
            self._found = None

    def advance(self, cache: TrieCache) -> None:
        """Computes one slice. The engine is idle."""
        found = self._found
        if found is None:
            return
        try:
            if self._slices is None:
                bound = cache.budget_bytes
                if bound is not None and cache.nbytes + cache.session_bytes(found.segment.name.stop) > bound:
                    self._found = None  # nothing is evicted for this
                    return
                self._slices = recheck(found.segment, found.prefix, self._make_layers, self._forward)
            next(self._slices)
        except StopIteration as end:
            self._end(cache, found, end.value)
        except Exception as error:  # models raise anything; a request would have met it, too
            log.warning("the disk cache cannot be checked", why=error_line(error))
            self._forget()

    def _end(self, cache: TrieCache, found: Found, off: float) -> None:
        self._forget()
        self.count += 1
        if off <= _LIMIT:
            return
        self.failures += 1
        log.warning(
            "the disk cache is wrong: emptied", difference=round(off, 2), file=found.segment.name.file,
            why="what it holds is not what this machine computes",
        )  # fmt: skip
        self._disk.empty()
        cache.detach()

    def _forget(self) -> None:
        self._found = None
        self._drop_layers()

    def _drop_layers(self) -> None:
        self._slices = None
        mx.clear_cache()
