"""The memory of the trie cache, by MLX's own counters.

MLX hands a freed buffer on to an array that is smaller, by up to two pages; these tests switch that off, and then
every byte that is active is a byte of some array. Scenarios: docs/internals/cache.md, 8.
"""

import gc
import random
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

from runner.cache.checkpoints import CheckpointPolicy
from runner.cache.layers.snapshot import GROUP_BYTES
from runner.cache.single import NullCache
from runner.cache.trie_cache import TrieCache
from runner.numbers.cache import cache_nodes

from mlx_lm.models.cache import KVCache  # isort: skip

from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from tests.lib.driver import Accident, ask, check_trie
from tests.lib.memory import exact_memory

KIB = 1024
LAYERS = 8


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_memory():
        yield


class Writer:
    """A model that only writes: eight layers of plain keys and values, 4 KiB a token. What one layer takes is little of
    the whole, and nothing of what is held for a moment is the model's own."""

    layers: Sequence[object] = ()

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array:
        entries = mx.broadcast_to(inputs[:, None, :, None], (1, 2, inputs.shape[1], 32)).astype(mx.float32)
        for layer_cache in cache:
            assert isinstance(layer_cache, KVCache)
            layer_cache.update_and_fetch(entries, entries)
        return mx.broadcast_to(mx.arange(VOCAB) == inputs[..., None], (1, inputs.shape[1], VOCAB)).astype(mx.float32)


def deep() -> Tiny:
    return Tiny("deep", Writer(), lambda: [KVCache() for _ in range(LAYERS)], 1e-4)


def active() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


class Users:
    """The users of one model and one cache, and the bytes held beside the model."""

    def __init__(self, model: Tiny, first_distance: int = 16, budget: int | None = None) -> None:
        ask(model, NullCache(model.facts), [1] * 20, say=2)  # what a model makes at its first use stays
        self.model = model
        self.before = active()
        self.cache = TrieCache(model.facts, budget, CheckpointPolicy(gap=3, first_distance=first_distance))
        self.random = random.Random(5)
        self._known: dict[int, dict] = {}  # type: ignore[type-arg]  # of tokens, recursive

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def ask(self, prompt: list[int], say: int = 3, chunk: int = 512, accident: Accident | None = None) -> list[int]:
        """Returns the conversation with the answer."""
        conversation = prompt + ask(self.model, self.cache, prompt, say=say, chunk=chunk, accident=accident).tokens
        check_trie(self.cache)
        node = self._known
        for token in conversation:
            node = node.setdefault(token, {})
        return conversation

    @property
    def held(self) -> int:
        """Bytes that MLX holds more than before the cache was made."""
        return active() - self.before

    @property
    def distinct(self) -> int:
        """The number of distinct prefixes recorded so far: of tokens that differ, or that follow different ones."""
        count, waiting = 0, [self._known]
        while waiting:
            node = waiting.pop()
            count += len(node)
            waiting.extend(node.values())
        return count

    @property
    def sliceable(self) -> list[int]:
        """The layers that hold something of every token."""
        return [slot for slot, state in self.cache.sequences.kept.used if state.sliceable]

    @property
    def token_bytes(self) -> int:
        """Returns the bytes that a token takes in the sliceable layers."""
        states = self.cache.sequences.kept.states
        return sum(x.nbytes // x.shape[-2] for slot in self.sliceable for x in states[slot].arrays())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_counted_is_what_is_held(kind: str) -> None:  # scenario 71
    """Three conversations take turns, with some that are cut short or fail; afterwards only the model is left."""
    users = Users(tiny(kind))
    conversations = [users.tokens(40) for _ in range(3)]
    accidents = [None, Accident("skip", 4), Accident("cancel", 4), Accident("break", 1), Accident("poison", 4)]
    most = 0
    for accident in accidents:
        for place, conversation in enumerate(conversations):
            prompt = conversation + users.tokens(25)
            conversations[place] = users.ask(prompt, say=4, chunk=64, accident=accident)
            counted = users.cache.nbytes
            # 1 KiB: a convolution state is a slice of one row more, after a token that was read alone.
            assert counted <= users.held <= 1.05 * counted + KIB
            most = max(most, counted)
    assert most > 10 * KIB
    users.cache.detach()
    assert users.cache.nbytes == 0
    assert users.held == 0


@pytest.mark.parametrize("chunk", [2048, 4096])
@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "qwen3_next", "gemma3", "llama4", "deepseek_v41"])
def test_a_long_prefill_leaves_states_behind_and_no_forward(kind: str, chunk: int) -> None:  # scenario 72
    """Convolution states are slices of what the forward made of 2048 tokens (Ollama #16698)."""
    users = Users(tiny(kind), first_distance=4096)
    users.ask(users.tokens(2052), say=2, chunk=chunk)
    assert [node.end for node in cache_nodes(users.cache) if node.restore_point] == [2048]
    assert users.cache.paged_bytes > 0  # its states
    assert abs(users.held - users.cache.nbytes) <= 64 * KIB


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", pytest.param("quantized", marks=pytest.mark.slow)])
def test_every_token_is_held_once(kind: str) -> None:
    """The cache holds at most 1.10 times the bytes of all distinct tokens: after a turn, after switching between
    conversations with a common prefix, after an edit in the middle, after an answer that was dropped."""
    users = Users(tiny(kind))
    tokens, token = users.tokens, 0

    def ask(prompt: list[int]) -> list[int]:
        nonlocal token
        conversation = users.ask(prompt)
        token = token or users.token_bytes
        assert users.held == users.cache.nbytes
        assert users.cache.nbytes <= 1.10 * users.distinct * token
        return conversation

    system = tokens(1500)
    a = ask(ask(system + tokens(1500)) + tokens(20))
    b = ask(system + tokens(1500))
    for _ in range(2):
        a, b = ask(a + tokens(20)), ask(b + tokens(20))
    edited = ask(ask(a[:2000] + tokens(200))[:-3] + tokens(1))
    for prompt in (edited[:1000] + tokens(1), b[:-30] + tokens(5), a + tokens(5)):
        ask(prompt)


def test_going_back_to_a_conversation_needs_room_for_two_groups_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group by group, here of a layer each, the one is copied out and the other moves in."""
    monkeypatch.setitem(GROUP_BYTES, "cpu", 0)
    users = Users(deep())
    system = users.tokens(1000)
    prompts = [system + users.tokens(2000), system + users.tokens(2000), users.tokens(300)]
    a, b, short = (users.ask(prompt, say=2) for prompt in prompts)
    layer = 3072 * users.token_bytes // LAYERS
    for conversation in (a, b, a, short, b):
        held = users.held
        mx.reset_peak_memory()
        session = users.cache.begin(conversation + users.tokens(1))
        with session.forward(1):
            peak = mx.get_peak_memory() - users.before
            users.model.model(mx.array([session.remaining]), cache=session.layers)
        mx.eval(session.state())
        session.close()
        assert peak <= held + 2 * layer + 64 * KIB
