"""An assistant drafts from what its target holds, wherever that is, and no answer is another for it."""

import weakref
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_map_with_path

from runner.cache import make_cache
from runner.cache.session import Session
from runner.cache.single import NullCache
from runner.cache.sketch import Sketch
from runner.drafts.assistant import AssistantDrafter, Place, Shared, read_shared
from runner.drafts.target import Tap
from runner.kv_bits.hadamard import HadamardKVCache, rotated
from runner.kv_bits.wing import find_format
from scripts.tools.models.assistants import VOCABULARY_SIZE, WIDTH
from scripts.tools.models.sources import Published
from tests.lib.driver import facts_of
from tests.lib.kernels import mlx_own
from tests.model.drafts.answers import DRAWN, GREEDY, PROMPT, Said, answer, greedy, proposed
from tests.model.drafts.assistant.conftest import Pairs
from tests.model.drafts.assistant.made import Pair, pair_of, write
from tests.model.loading.stored import put

from mlx_lm.models.cache import KVCache, RotatingKVCache  # isort: skip

WINDOW = 32
COUNT = 24  # the answer goes beyond the window


@pytest.fixture(scope="module")
def right(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model that sees its last token only, and an assistant that does the same: its drafts are right."""
    opened = put(tmp_path_factory.mktemp("right"), "gemma4-text", published("gemma4-text")).open()
    pair = pair_of(opened, write(tmp_path_factory.mktemp("assistant")))

    def silent(path: str, array: mx.array) -> mx.array:
        ends = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")
        return mx.zeros_like(array) if path.endswith(ends) else array

    for module in (pair.loaded.module, pair.assistant.module):
        module.update(tree_map_with_path(silent, module.parameters()))
    pair.loaded.module.final_logit_softcapping = None
    text = pair.loaded.module.model
    width = text.norm.weight.shape[0]
    more = (0, WIDTH - width)
    pair.assistant.module.update(
        {
            "pre_projection": {"weight": mx.concatenate([mx.eye(WIDTH, width), mx.zeros((WIDTH, width))], axis=1)},
            "model": {
                "embed_tokens": {"weight": mx.pad(text.embed_tokens.weight, [(0, 0), more])},
                # The zeros beside a row halve the mean of its squares.
                "norm": {"weight": mx.pad(text.norm.weight, more) / (WIDTH / width) ** 0.5},
                "layers": [{"layer_scalar": mx.ones(1)} for _ in pair.assistant.module.model.layers],
            },
        }
    )
    return pair


def from_scratch(pair: Pair, text: list[int], count: int) -> list[int]:
    """The most probable drafts behind a text, by one forward over all of it and layers that forget nothing."""
    layers: list[object] = [KVCache() for _ in pair.loaded.make_layers()]
    tap = Tap([pair.assistant.target.norm], len(text))
    _, hidden = tap.observe(lambda: pair.loaded.logits(mx.array([text[:-1]]), layers))
    assert hidden is not None
    hidden, drafts = hidden[:, -1:], [text[-1]]
    shared = {}
    for kind, place in pair.assistant.places.items():
        cache = cast("KVCache", layers[place.layer])
        begin = max(0, cache.offset - WINDOW) if kind == "sliding_attention" else 0
        kept = (cast("mx.array", x) for x in (cache.keys, cache.values))
        shared[kind] = Shared(*(x[..., begin : cache.offset, :] for x in kept))
    for _ in range(count):
        logits, hidden = pair.assistant.step(mx.array([drafts[-1:]]), hidden, shared, mx.array([len(text) - 2]))
        drafts.append(cast("int", mx.argmax(logits[0, 0]).item()))
    return drafts[1:]


def drafted(pair: Pair, kind: str = "greedy", prompt: list[int] = PROMPT, most: int = 3) -> Said:
    drafter = AssistantDrafter("an assistant", pair.assistant)
    return answer(pair.loaded, NullCache(facts_of(pair.loaded)), prompt, COUNT, DRAWN[kind], drafter, most)


@pytest.mark.parametrize("kind", DRAWN)
def test_drafts_that_are_right_are_all_accepted(kind: str, right: Pair) -> None:
    said = drafted(right, kind)
    assert said.accepted == said.drafted == COUNT * 3 // 4


@pytest.mark.parametrize(("name", "cache"), [("gemma4", "trie"), ("gemma4-unified", "single")])
def test_drafts_are_those_of_the_whole_text(name: str, cache: str, pairs: Pairs) -> None:
    """Behind every round, in a window that is full and in one that is not, and in an answer that a cache resumed."""
    pair = pairs(name, "every token")
    drafter, rounds = AssistantDrafter("an assistant", pair.assistant), list[tuple[list[int], list[int]]]()

    def observe(session: Session, drafts: list[int]) -> None:
        rounds.append(([*session.recorded], drafts))

    kept = make_cache(cache, facts_of(pair.loaded))
    first = answer(pair.loaded, kept, PROMPT, COUNT, GREEDY, drafter, 3, observe)
    again = [*PROMPT, *first.tokens, *PROMPT[3:9]]
    answer(pair.loaded, kept, again, COUNT, GREEDY, drafter, 3, observe)
    edited = [*PROMPT[:-3], 5, *PROMPT]
    answer(pair.loaded, kept, edited, COUNT, GREEDY, drafter, 2, observe)
    assert len(rounds) > 40
    assert max(len(text) for text, _ in rounds) > 2 * WINDOW
    assert all(drafts for _, drafts in rounds)
    for text, drafts in rounds[::3]:
        assert drafts == from_scratch(pair, text, len(drafts))


def unpacked(cache: HadamardKVCache, parts: object) -> mx.array:
    words, scales, biases = (part[..., : cache.offset, :] for part in cast("list[mx.array]", parts))
    return rotated(mx.dequantize(words, scales, biases, cache.group_size, cache.mean_bits))


def test_packed_keys_and_values_are_read_as_they_are(pairs: Pairs) -> None:
    """Those of `--kv-bits`, which the target's own attention multiplies packed, too."""
    pair = pairs("gemma4-unified", "every token")
    make_layers, salt = find_format(pair.loaded.make_layers, pair.loaded.logits, VOCABULARY_SIZE, 8)
    assert salt == "kv8"
    prompt = [*PROMPT, *PROMPT]
    with mlx_own():
        layers = make_layers()
        pair.loaded.logits(mx.array([prompt]), layers)
        shared = read_shared(pair.assistant.places, pair.assistant.kinds, layers)
        plain, packed = dict(shared), 0
        for kind, place in pair.assistant.places.items():
            cache = layers[place.layer]
            if isinstance(cache, HadamardKVCache):
                packed += 1
                plain[kind] = Shared(*(unpacked(cache, parts) for parts in (cache.keys, cache.values)))
        assert packed == 1  # windows stay as they are
        tokens, hidden = mx.array([[7]]), mx.random.normal((1, 1, 64), key=mx.random.key(2))
        both = (pair.assistant.step(tokens, hidden, each, mx.array([len(prompt) - 1])) for each in (shared, plain))
        for one, other in zip(*both, strict=True):
            assert mx.abs(one - other).max() <= 1e-5 * mx.abs(other).max()
    drafter = AssistantDrafter("an assistant", pair.assistant)
    facts = Sketch(make_layers, pair.loaded.logits, VOCABULARY_SIZE).facts
    said = answer(pair.loaded, NullCache(facts), PROMPT, COUNT, GREEDY, drafter, 3)
    assert said.tokens == answer(pair.loaded, NullCache(facts), PROMPT, COUNT, GREEDY).tokens
    assert said.drafted > COUNT


@pytest.mark.parametrize("steps", [(20,), (32,), (33,), (50,), (20, 1), (31, 1), (32, 1), (33, 1), (50, 1, 1), (40, 5)])
def test_the_last_tokens_of_a_window_are_read(steps: tuple[int, ...]) -> None:
    """In order, in a ring, with room behind them, and with older ones before them."""
    ring, at = RotatingKVCache(WINDOW), 0
    for count in steps:
        tokens = mx.arange(at, at + count).astype(mx.float32)[None, None, :, None]
        ring.update_and_fetch(tokens, -tokens)
        at += count
    shared = read_shared({"sliding": Place(0, 1, 1)}, ["sliding"], [ring])
    keys, values = shared["sliding"].keys, shared["sliding"].values
    assert keys is not None
    assert values is not None
    assert sorted(cast("list[int]", keys.flatten().tolist())) == [*range(max(0, at - WINDOW), at)]
    assert mx.array_equal(values, -keys)


def standing(pair: Pair, count: int = 6) -> tuple[AssistantDrafter, list[object]]:
    """A drafter whose target has seen so many tokens."""
    drafter, layers = AssistantDrafter("an assistant", pair.assistant), pair.loaded.make_layers()
    drafter.watch(pair.loaded.logits)(mx.array([PROMPT[:count]]), layers)
    return drafter, layers


def test_nothing_is_drafted_where_the_text_is_not_known(pairs: Pairs) -> None:
    pair = pairs("gemma4-text", "every token")
    drafter, layers = standing(pair)
    text = [1] * 30
    assert proposed(drafter, pair.loaded.make_layers(), 6, text[:7], 3, greedy) == []  # another answer
    assert proposed(drafter, layers, 6, text[:9], 3, greedy) == []  # more than one token that the target has not seen
    assert proposed(drafter, layers, 8, text[:9], 3, greedy) == []  # two tokens that only others have seen
    assert proposed(drafter, layers, 5, text[:6], 3, greedy) == []  # the layers have seen more
    assert proposed(drafter, layers, 6, [*text[:6], -3], 3, greedy) == []  # a picture
    assert proposed(drafter, [], 6, text[:7], 3, greedy) == []
    first = proposed(drafter, layers, 6, text[:7], 3, greedy)
    assert len(first) == 3
    assert proposed(drafter, layers, 6, text[:7], 5, greedy)[:3] == first
    pair.loaded.logits(mx.array([[1]]), layers)  # unseen
    assert proposed(drafter, layers, 7, text[:8], 3, greedy) == []
    drafter.free()
    assert drafter.nbytes == 0
    drafter, layers = standing(pair)
    cast("KVCache", layers[1]).trim(1)  # one of the two stands elsewhere
    assert proposed(drafter, layers, 6, text[:7], 3, greedy) == []


def test_a_layer_of_a_kind_that_gemma_does_not_have_is_refused(pairs: Pairs) -> None:
    class Strange(KVCache):
        pass

    pair = pairs("gemma4-text", "every token")
    drafter, layers = standing(pair)
    place = pair.assistant.places["full_attention"].layer
    strange = Strange()  # type: ignore[no-untyped-call]
    vars(strange).update(vars(layers[place]))
    layers[place] = strange
    with pytest.raises(TypeError, match="cannot read a Strange"):
        proposed(drafter, layers, 6, [1] * 7, 3, greedy)


def test_a_drafter_keeps_no_layers_of_the_target_alive(pairs: Pairs) -> None:
    drafter, layers = standing(pairs("gemma4-text", "every token"))
    proposed(drafter, layers, 6, [1] * 7, 2, greedy)
    alive = [weakref.ref(layer) for layer in layers]
    del layers
    assert not any(each() for each in alive)


def test_no_group_is_drafted_that_was_not_chosen(pairs: Pairs) -> None:
    """However little the chosen tokens are worth."""
    pair = pairs("gemma4-text", "groups")
    drafter, layers = standing(pair)
    seen: list[int] = []

    def draw(logits: mx.array) -> mx.array:
        seen.append(cast("int", mx.isfinite(logits).sum().item()))
        return mx.argmin(mx.where(mx.isfinite(logits), logits, mx.inf), axis=-1)

    assert len(proposed(drafter, layers, 6, [1] * 7, 4, draw)) == 4
    assert seen == [40] * 4


def test_suppressed_tokens_are_never_drafted(pairs: Pairs) -> None:
    pair = pairs("gemma4-text", "every token")
    best = standing(pair)
    token = proposed(best[0], best[1], 6, [1] * 7, 1, greedy)[0]
    barred = Pair(pair.loaded, pair.assistant._replace(suppressed=(token,)))
    drafter, layers = standing(barred)
    assert proposed(drafter, layers, 6, [1] * 7, 1, greedy) != [token]
