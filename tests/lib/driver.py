"""Serves a request over a real model and a cache in the order of the engine, and checks the cache afterwards."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx

from runner.cache.interface import PrefixCache
from runner.cache.layers import adapt, flatten
from runner.cache.layers.snapshot import Ledger
from runner.cache.session import Session
from runner.cache.single import NullCache, SingleEntryCache
from runner.cache.sketch import LayerFacts, Sketch
from runner.cache.trie_cache import TrieCache
from runner.model.weights.loading import LoadedModel
from scripts.tools.models.tiny import VOCAB, Tiny


class BrokenError(Exception):
    """The fault that a test causes."""


class Accident(NamedTuple):
    """An event that cuts a request short. `at` counts forwards from 0, prefill and decode alike.

    kind: "cancel" leaves before a forward, "skip" after the forward of a sampled token and before it is recorded,
    "break" raises in the last layer of a forward, "poison" stands for an evaluation that failed after it.
    """

    kind: str
    at: int


class Answer(NamedTuple):
    """The outcome of a request: the sampled tokens, and the logits [VOCAB] that each was taken from."""

    tokens: list[int]
    logits: list[mx.array]
    session: Session


def ask(
    tiny: Tiny,
    cache: PrefixCache,
    prompt: Sequence[int],
    *,
    say: int = 4,
    chunk: int = 7,
    accident: Accident | None = None,
) -> Answer:
    """Serves one prompt greedily for `say` tokens, or until the accident."""
    forwards = 0

    def forward(session: Session, tokens: mx.array) -> mx.array:
        nonlocal forwards
        if accident == Accident("cancel", forwards):
            raise BrokenError("cancelled")
        with session.forward(tokens.shape[1]), breaking_layer(tiny, accident == Accident("break", forwards)):
            logits = tiny.model(tokens, cache=session.layers)
        if accident == Accident("poison", forwards):
            raise MemoryError("no memory for the evaluation")
        forwards += 1
        return logits[0, -1]

    said, taken, failed = [], [], True
    session = cache.begin(prompt)
    try:
        at = session.cached
        while count := session.next_forward(chunk):
            forward(session, mx.array([prompt[at : at + count]]))
            mx.eval(session.state())
            at += count
        token = mx.array(prompt[-1])
        logits = forward(session, token[None, None])
        for _ in range(say):
            taken.append(logits)
            token = mx.argmax(logits)
            mx.async_eval(token)
            # One step ahead: the forward of this token is on its way before the token is read.
            logits = forward(session, token[None, None])
            if accident == Accident("skip", forwards - 1):
                break
            said.append(cast("int", token.item()))
            session.record(said[-1])
        failed = False
    except BrokenError:
        failed = False
    except MemoryError:
        pass
    finally:
        session.failed |= failed
        session.close()
    return Answer(said, taken, session)


def facts_of(model: LoadedModel) -> LayerFacts:
    """Returns what the layers of a model hold."""
    return Sketch(model.make_layers, model.logits, VOCAB).facts


def check_facts(tiny: Tiny) -> None:
    """Checks that a sketch shows what the layers hold when as much is computed, and more, in other forwards."""
    facts, layers, seen = tiny.facts, tiny.make_layers(), 0
    states = [adapt(layer, Ledger()) for layer in flatten(layers)]
    for count in (16, 1, 24, 7, 1):
        logits = tiny.logits(mx.array([[(7 * seen + each) % VOCAB for each in range(count)]]), layers)
        seen += count
        for state in states:
            if state.whole:
                state.count_tokens(count)
        mx.eval(logits, [state.arrays() for state in states])
        used = {slot: state for slot, state in enumerate(states) if not state.empty}
        assert facts.used == used.keys()
        assert facts.untrusted == {slot for slot, state in used.items() if state.offset != seen}
        if seen == 17:
            assert facts.bytes_of(0) == sum(state.nbytes for state in states if not state.sliceable)
    sliceable = [array for state in states if state.sliceable for array in state.arrays()]
    assert facts.token_bytes == sum(array.nbytes // array.shape[-2] for array in sliceable)


def ask_uncached(tiny: Tiny, prompt: Sequence[int], *, say: int = 4, chunk: int = 7) -> Answer:
    """Serves the same request without a cache: the oracle."""
    return ask(tiny, NullCache(tiny.facts), prompt, say=say, chunk=chunk)


def forwards_at_once(tiny: Tiny, tokens: Sequence[int], boundaries: Sequence[int]) -> list[mx.array]:
    """Returns the logits after each of these forwards, in one run over fresh layers: the oracle for bit-equality."""
    layers, at, logits = tiny.make_layers(), 0, []
    for count in boundaries:
        logits.append(tiny.model(mx.array([tokens[at : at + count]]), cache=layers)[0, -1])
        mx.eval(logits[-1])
        at += count
    return logits


def check_equal(tiny: Tiny, answer: Answer, oracle: Answer) -> None:
    """Checks that the tokens are equal and the logits close, up to the end of the shorter one.

    Where the two best tokens of the oracle are closer than the tolerance either is right, and the rest says nothing.
    """
    for step, (ours, theirs) in enumerate(zip(answer.logits, oracle.logits, strict=False)):
        distance = largest(ours - theirs)
        assert distance <= tiny.tolerance, f"step {step}: logits differ by {distance:.2g}"
        if largest(mx.diff(mx.sort(theirs)[-2:])) <= tiny.tolerance:
            return
        if step < min(len(answer.tokens), len(oracle.tokens)):
            assert answer.tokens[step] == oracle.tokens[step], f"step {step}"


def largest(x: mx.array) -> float:
    """Returns the largest magnitude in `x`."""
    return cast("float", mx.abs(x).max().item())


def check_trie(cache: TrieCache) -> None:
    """Checks between sessions that edges, snapshots, bytes and layers of a trie cache agree with each other."""
    sequence, end = cache.sequences.kept, cache.sequences.end
    assert {state.offset for _, state in sequence.used if not state.empty} <= {end.end if end else 0}
    locks = Counter(node for end in cache.sequences.parked.values() for node in end.path())
    count = nbytes = 0
    for node in cache.trie.nodes():
        assert node.parent is not None
        assert node.parent.children[node.tokens[0]] is node
        assert node.start == node.parent.end < node.end
        assert node.locks == locks[node]
        for slot, snapshot in enumerate(node.slots):
            if snapshot is not None:
                count, nbytes = count + 1, nbytes + snapshot.nbytes
                assert snapshot.stop == node.end
                assert snapshot.start == node.start or not sequence.states[slot].sliceable
                assert not snapshot.live or snapshot.nbytes == 0
    ledger = cache.sequences.totals.ledger
    assert (count, nbytes) == (ledger.count, ledger.nbytes)


def check_level(cache: SingleEntryCache) -> None:
    """Checks between sessions that all layers stand at the end of the record, with everything evaluated."""
    sequence = cache.sequence
    assert sequence is not None
    offsets = {state.offset for state in sequence.states if not state.empty}
    recorded = len(cache.tokens)
    assert offsets == ({recorded} if recorded else set()), f"record {recorded}"


@contextmanager
def breaking_layer(tiny: Tiny, wanted: bool, error: Callable[[str], Exception] = MemoryError) -> Iterator[None]:
    """Makes the last layer of the model raise, when the others have seen the tokens already."""
    if not wanted:
        yield
        return
    last = tiny.model.layers[-1]
    kind = type(last)
    original: Callable[..., object] = kind.__call__

    def broken(self: object, *args: object, **named: object) -> object:
        if self is last:
            raise error("in the last layer")
        return original(self, *args, **named)

    with patch.object(kind, "__call__", broken):
        yield
