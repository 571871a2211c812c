"""The memory of the trie cache, by MLX's own counters.

MLX hands a freed buffer on to an array that is smaller, by up to two pages; these tests switch that off, and then
every byte that is active is a byte of some array.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import gc
import random
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.checkpoints import TurnCheckpoints
from runner.cache.none import NullCache
from runner.cache.trie_cache import TrieCache

from mlx_lm.models.cache import KVCache  # isort: skip

from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from tests.lib.driver import Accident, ask, check_trie

KIB = 1024
LAYERS = 8


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Only what arrays hold counts."""
    gc.collect()
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


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
        ask(model, NullCache(model.make_layers), [1] * 20, say=2)  # what a model makes at its first use stays
        self.model = model
        self.before = active()
        self.cache = TrieCache(model.make_layers, budget, TurnCheckpoints(gap=3, first_distance=first_distance))
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


# --- counted is held


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
    users.cache.clear()
    assert users.cache.nbytes == 0
    assert users.held == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "gemma3"])
def test_what_is_evicted_is_freed(kind: str) -> None:
    """Five conversations with a common beginning, and room for about two."""
    users = Users(tiny(kind), budget=120_000)
    system, most = users.tokens(30), 0
    for turn in range(10):
        users.ask(system + [turn] * 5 + users.tokens(90), say=4, chunk=64)
        assert users.held <= 1.05 * users.cache.nbytes + KIB
        assert users.cache.nbytes <= 120_000
        most = max(most, users.cache.nbytes)
    assert most > 80_000


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "qwen3_next", "gemma3", "llama4", "deepseek_v41"])
def test_a_long_prefill_leaves_states_behind_and_no_forward(kind: str) -> None:  # scenario 72
    """Convolution states are slices of what the forward made of 2048 tokens (Ollama #16698)."""
    users = Users(tiny(kind), first_distance=4096)
    users.ask(users.tokens(2052), say=2, chunk=2048)
    assert [node.end for node in users.cache.nodes() if node.restore_point] == [2048]
    assert users.cache.describe().counts.paged_bytes > 0  # its states
    assert abs(users.held - users.cache.nbytes) <= 64 * KIB


@pytest.mark.parametrize("kind", ["llama", "mamba2", "falcon_h1", "qwen3_next", "gemma3", "llama4"])
def test_a_cancelled_prefill_leaves_no_forward_behind(kind: str) -> None:  # scenario 72
    """Nor where no other forward follows. (Layers of the generic adapter may: their arrays can be slices of others.)"""
    users = Users(tiny(kind), first_distance=4096)
    users.ask(users.tokens(2052), chunk=2048, accident=Accident("cancel", 1))
    assert users.cache.nbytes > 0
    assert abs(users.held - users.cache.nbytes) <= 64 * KIB


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_one_head_with_little_room_to_spare_shares_nothing(kind: str) -> None:  # scenario 73
    """Of 256 entries 252 are used, which mx.contiguous would hand out as they are, and with them the whole buffer."""
    users = Users(tiny(kind))
    users.ask(conversation := users.tokens(250), say=2)
    for edit in (60, 120, 180):  # each time the tail is copied out of a buffer that goes on being written
        users.ask(conversation[:edit] + users.tokens(10), say=2)
        assert users.held == users.cache.nbytes
        users.ask(conversation + users.tokens(1), say=2)
        assert users.held == users.cache.nbytes


# --- every token once


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", pytest.param("quantized", marks=pytest.mark.slow)])
def test_every_token_is_held_once(kind: str) -> None:
    """The cache holds at most 1.10 times the bytes of all distinct tokens: after a turn, after switching between
    conversations with a common prefix, after an edit in the middle, after an answer that was dropped."""
    users = Users(tiny(kind))
    token = 0

    def check() -> None:
        nonlocal token
        token = token or users.token_bytes
        assert users.held == users.cache.nbytes
        assert users.cache.nbytes <= 1.10 * users.distinct * token

    system = users.tokens(1500)
    a = users.ask(system + users.tokens(1500))
    check()
    a = users.ask(a + users.tokens(20))
    check()
    b = users.ask(system + users.tokens(1500))
    check()
    for _ in range(2):
        a = users.ask(a + users.tokens(20))
        check()
        b = users.ask(b + users.tokens(20))
        check()
    edited = users.ask(a[:2000] + users.tokens(200))
    check()
    edited = users.ask(edited[:-3] + users.tokens(1))
    check()
    users.ask(edited[:1000] + users.tokens(1))
    check()
    users.ask(b[:-30] + users.tokens(5))
    check()
    users.ask(a + users.tokens(5))
    check()


def test_what_is_computed_again_is_held_once() -> None:
    """Keys and values are stored up to where a prompt leaves a conversation, the state is not: both are computed again
    from the start, and the stored slices give way to the live ones."""
    users = Users(tiny("qwen3_next"), first_distance=4096)
    conversation = users.ask(users.tokens(300))
    users.ask(users.tokens(30))
    assert users.cache.describe().counts.paged_bytes > 300 * users.token_bytes
    users.ask(conversation[:200] + users.tokens(20))
    assert users.cache.sequences.end is not None
    slices = [node.slots[slot] for node in users.cache.sequences.end.path()[1:] for slot in users.sliceable]
    assert len(slices) >= 2
    assert all(piece is not None and piece.live for piece in slices)


def test_short_conversations_have_room_for_a_few_hundred_tokens() -> None:
    """mlx-lm's buffers grow by 256 tokens, and that much room stays in a longer one: what is live may have it, once;
    what is stored has none."""
    users = Users(tiny("llama"))
    conversations = [users.ask(users.tokens(30 + 50 * place)) for place in range(8)]
    token = users.token_bytes
    for place, conversation in enumerate(conversations):
        conversations[place] = users.ask(conversation + users.tokens(3))
        assert users.cache.nbytes <= (users.distinct + 512) * token
    users.ask(users.tokens(1), say=0)
    assert users.cache.nbytes <= (users.distinct + 256) * token


# --- on the way


def test_going_back_to_a_conversation_needs_room_for_two_layers() -> None:
    """Layer by layer the one is copied out and the other moves in."""
    users, (a, b, short) = _two_long_and_a_short()
    layer = 3072 * users.token_bytes // LAYERS
    for conversation in (a, b, a, short, b):
        held = users.held
        peak, _ = _peaks(users, conversation + users.tokens(1))
        assert peak <= held + 2 * layer + 64 * KIB


def test_leaving_a_conversation_needs_room_for_one_layer() -> None:
    """Before it is overwritten from the middle, or from the start: layer by layer it is copied out, and its buffers are
    given back."""
    users, (a, b, _) = _two_long_and_a_short()
    layer = 3072 * users.token_bytes // LAYERS
    for common in (2000, 1000, 0):
        users.ask(b + users.tokens(1), say=0)
        held = users.held
        peak, _ = _peaks(users, b[:common] + users.tokens(1))
        assert peak <= held + layer + 64 * KIB
    assert users.held == users.cache.nbytes
    users.ask(a)


def test_the_first_token_after_a_restore_moves_no_buffer() -> None:  # scenario 74
    users, (a, b, _) = _two_long_and_a_short()
    layer = 3072 * users.token_bytes // LAYERS
    for conversation in (a, b, a):
        _, forward = _peaks(users, conversation + users.tokens(1))
        assert forward <= layer // 4


@pytest.mark.parametrize("common", [1500, 2500, 2900, 3000])
def test_the_first_token_after_a_rewind_moves_no_buffer(common: int) -> None:  # scenario 74
    """Snapshots that are copied out release the buffers at once, and a cut buffer keeps some room to grow."""
    users, (_, b, _) = _two_long_and_a_short()
    users.ask(b + users.tokens(1), say=0)
    _, forward = _peaks(users, b[:common] + users.tokens(1))
    assert forward <= common * users.token_bytes // LAYERS // 4


def _two_long_and_a_short() -> tuple[Users, list[list[int]]]:
    """Conversations of 3002, 3002 and 302 tokens, the first two with a common beginning."""
    users = Users(deep())
    system = users.tokens(1000)
    prompts = [system + users.tokens(2000), system + users.tokens(2000), users.tokens(300)]
    return users, [users.ask(prompt, say=2) for prompt in prompts]


def _peaks(users: Users, prompt: list[int]) -> tuple[int, int]:
    """The most bytes held, above the model's, until the layers are ready for the rest of a prompt, which is one token;
    and the most held more than that while the model reads it."""
    mx.reset_peak_memory()
    session = users.cache.begin(prompt)
    assert session.remaining == prompt[-1:]
    with session.forward(1):
        ready, begun = mx.get_active_memory(), mx.get_peak_memory()
        mx.reset_peak_memory()
        users.model.model(mx.array([session.remaining]), cache=session.layers)
    mx.eval(session.state())
    mx.synchronize()
    forward = mx.get_peak_memory() - ready
    session.close()
    return begun - users.before, forward
