"""The single-entry cache over real layer caches: what it gives equals what a run without a cache gives.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.interface import Miss
from runner.cache.single import SingleEntryCache

from mlx_lm.models.cache import KVCache  # isort: skip

from scripts.tools.models.tiny import CHUNK, KINDS, VOCAB, WINDOW, tiny, words
from tests.lib.driver import Accident, ask, ask_uncached, check_equal, check_level, forwards_at_once, largest
from tests.lib.memory import held_bytes

every_kind = pytest.mark.parametrize("kind", KINDS)
SLICEABLE = ("llama", "deepseek_v3")
RECURRENT = ("mamba2", "qwen3_next", "falcon_h1", "deepseek_v41")  # the last is unknown, and treated alike


@every_kind
def test_another_first_token_changes_the_logits(kind: str) -> None:
    """The control: without it all comparisons here would be idle."""
    model = tiny(kind)
    prompt = words(40)
    one = ask_uncached(model, prompt).logits[0]
    other = ask_uncached(model, [(prompt[0] + 1) % VOCAB, *prompt[1:]]).logits[0]
    assert largest(one - other) > 10 * model.tolerance


@every_kind
def test_an_extension_is_bit_equal_to_a_run_with_the_same_forwards(kind: str) -> None:
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    prompt = words(41)
    first = ask(model, cache, prompt, chunk=16)
    longer = [*prompt, *first.tokens, *words(37, seed=2)]
    second = ask(model, cache, longer, chunk=16)
    assert second.session.cached == 45
    boundaries = [16, 16, 8, 1, *[1] * 4, 16, 16, 4, 1, *[1] * 3]
    oracle = forwards_at_once(model, longer + second.tokens, boundaries)
    for ours, theirs in zip([*first.logits, *second.logits], [*oracle[3:7], *oracle[-4:]], strict=True):
        assert mx.array_equal(ours, theirs)


@every_kind
def test_a_conversation_equals_one_without_a_cache(kind: str) -> None:
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    history = words(20)
    for turn in range(4):
        answer = ask(model, cache, history)
        check_equal(model, answer, ask_uncached(model, history))
        check_level(cache)
        assert answer.session.cached == (len(history) - 15 if turn else 0)
        history = [*history, *answer.tokens, *words(15, seed=turn)]


@every_kind
@pytest.mark.parametrize("common", [3, 31, 40, 59])
def test_a_divergence_equals_a_run_without_a_cache(kind: str, common: int) -> None:
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    prompt = words(60)
    ask(model, cache, prompt)
    other = [*prompt[:common], (prompt[common] + 1) % VOCAB, *words(9, seed=3)]
    answer = ask(model, cache, other)
    check_equal(model, answer, ask_uncached(model, other))
    check_level(cache)
    assert answer.session.matched == common
    if kind in SLICEABLE:
        assert answer.session.cached == common
    longer = [*other, *answer.tokens, *words(3, seed=8)]
    assert ask(model, cache, longer).session.cached == len(longer) - 3


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_compute_all_again_for_the_same_prompt(kind: str) -> None:  # scenario 3
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    prompt = words(30)
    first = ask(model, cache, prompt)
    again = ask(model, cache, prompt)
    assert (again.session.cached, again.session.miss) == (0, Miss.NON_TRIMMABLE)
    check_equal(model, again, first)


@pytest.mark.parametrize("length", [WINDOW - 6, WINDOW - 4, WINDOW - 3, WINDOW, 2 * WINDOW + 5])
def test_a_divergence_inside_a_full_window_computes_all_again(length: int) -> None:  # scenario 13
    """4 tokens are said, so the record ends at length + 4. mlx-lm's own trim of a wrapped window is wrong by several
    units of logit here, without an error."""
    model = tiny("gemma3")
    cache = SingleEntryCache(model.make_layers)
    prompt = words(length)
    ask(model, cache, prompt)
    other = [*prompt[:-3], *words(8, seed=4)]
    answer = ask(model, cache, other)
    check_equal(model, answer, ask_uncached(model, other))
    if length + 4 <= WINDOW:
        assert (answer.session.cached, answer.session.miss) == (length - 3, Miss.NONE)
    else:
        assert (answer.session.cached, answer.session.miss) == (0, Miss.WINDOW_PASSED)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("cut", [1, 5, 19])
def test_a_window_that_was_rewound_goes_on_as_if_never_filled(cut: int, chunk: int) -> None:
    """A stale tail behind the window looks like a ring to mlx-lm, depending on the length of the next forward."""
    model = tiny("gemma3")
    cache = SingleEntryCache(model.make_layers)
    prompt = words(20)
    ask(model, cache, prompt)
    other = [*prompt[:cut], *words(60, seed=5)]
    answer = ask(model, cache, other, chunk=chunk)
    assert answer.session.cached == cut
    check_equal(model, answer, ask_uncached(model, other, chunk=chunk))


@pytest.mark.parametrize(("common", "cached"), [(39, 39), (33, 33), (32, 32), (31, 0), (20, 0)])
def test_a_chunk_goes_back_to_its_start_and_no_further(common: int, cached: int) -> None:  # scenario 14
    """The record ends at 44, in the third chunk of 16; forwards of 7 have dropped what lies before."""
    model = tiny("llama4")
    assert CHUNK == 16
    cache = SingleEntryCache(model.make_layers)
    prompt = words(40)
    ask(model, cache, prompt)
    other = [*prompt[:common], (prompt[common] + 1) % VOCAB, *words(30, seed=6)]
    answer = ask(model, cache, other)
    assert answer.session.cached == cached
    assert answer.session.miss == (Miss.NONE if cached else Miss.WINDOW_PASSED)
    check_equal(model, answer, ask_uncached(model, other))


@every_kind
def test_a_cancelled_prefill_is_continued(kind: str) -> None:  # scenario 10
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    prompt = words(50)
    ask(model, cache, prompt, accident=Accident("cancel", 2))
    check_level(cache)
    answer = ask(model, cache, prompt)
    assert answer.session.cached == 14
    check_equal(model, answer, ask_uncached(model, prompt))


@every_kind
@pytest.mark.parametrize("accident", ["cancel", "skip", "break", "poison"])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_after_an_accident_in_any_forward_the_next_answer_is_right(kind: str, accident: str, at: int) -> None:
    """Forwards 0 to 3 are prefill, 4 is the last token of the prompt, the others are sampled tokens."""  # scenario 11
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    prompt = words(26)
    before = ask(model, cache, prompt[:3], say=0)
    assert before.session.cached == 0
    cut = ask(model, cache, prompt, chunk=6, accident=Accident(accident, at))
    check_level(cache)
    if accident in ("break", "poison"):
        assert cache.tokens == []
    longer = [*prompt, *cut.tokens, *words(5, seed=7)]
    check_equal(model, ask(model, cache, longer), ask_uncached(model, longer))
    check_level(cache)


@every_kind
def test_a_layer_ahead_at_close_is_rewound_or_all_is_freed(kind: str) -> None:  # scenario 12
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    prompt = words(20)
    session = cache.begin(prompt)
    for count in (8, 8):
        with session.forward(count):
            model.model(mx.array([prompt[:count] if session.state() == [] else prompt[8:16]]), cache=session.layers)
    sequence = cache.sequence
    assert sequence is not None
    ahead = sequence.states[-1]
    if isinstance(layer_cache := getattr(ahead, "layer", None), KVCache):
        keys, values = (x[..., :1, :] for x in ahead.arrays())
        layer_cache.update_and_fetch(keys, values)
    else:
        ahead.advance(1)
    session.close()
    check_level(cache)
    kept = 0 if kind in ("mamba2", "deepseek_v41") else 16
    assert cache.describe().recorded_tokens == kept
    check_equal(model, ask(model, cache, prompt), ask_uncached(model, prompt))


def test_a_layer_with_another_clock_is_kept_whole() -> None:
    """A class that we know, used by a model in its own way: one entry for two tokens. Its offset is not ours."""
    cache = SingleEntryCache(lambda: [KVCache(), KVCache()])

    def forward(count: int) -> None:
        for layer, entries in zip(session.layers, (count, count // 2), strict=True):
            assert isinstance(layer, KVCache)
            layer.update_and_fetch(mx.ones((1, 1, entries, 4)), mx.ones((1, 1, entries, 4)))

    for prompt, cached in (
        ([1, 2, 3, 4], 0),
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5, 9], 0),
        ([1, 2, 3, 4, 5, 8], 0),
    ):
        session = cache.begin(prompt)
        assert session.cached == cached
        with session.forward(len(session.remaining)):
            forward(len(session.remaining))
        session.close()
        check_level(cache)
        assert cache.tokens == prompt


def test_a_closed_session_leaves_nothing_to_compute() -> None:
    """A recorded token has real data behind it, also the convolution states that no logits depend on."""
    model = tiny("mamba2")
    cache = SingleEntryCache(model.make_layers)
    ask(model, cache, words(100), chunk=100)
    sequence = cache.sequence
    assert sequence is not None
    before = held_bytes()
    sequence.evaluate()
    assert held_bytes() == before


@every_kind
def test_freed_layers_free_their_memory(kind: str) -> None:
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    ask(model, cache, words(4), say=1)
    cache.clear()
    before = held_bytes()
    for seed in range(3):
        ask(model, cache, words(70, seed), chunk=32)
        assert cache.nbytes > 0
    cache.clear()
    assert cache.nbytes == 0
    assert held_bytes() <= before + 4096


@every_kind
def test_layers_are_the_same_objects_for_good(kind: str) -> None:  # scenario 47
    """A model may hold one of them."""
    model = tiny(kind)
    cache = SingleEntryCache(model.make_layers)
    first = ask(model, cache, words(10)).session.layers
    ids = [id(layer) for layer in first]
    for prompt in (words(12, seed=9), words(5, seed=9), words(12, seed=8)):
        assert [id(layer) for layer in ask(model, cache, prompt).session.layers] == ids
