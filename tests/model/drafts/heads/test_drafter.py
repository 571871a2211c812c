"""A head drafts behind the text that it follows, and no answer is another for it."""

import weakref
from collections.abc import Callable
from typing import NamedTuple, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_map_with_path

from runner.cache.layers.batched import BatchedLayers
from runner.cache.session import Session
from runner.cache.single import NullCache
from runner.drafts.heads.head import Head, HeadDrafter
from runner.drafts.heads.head_plan import load_head
from runner.drafts.hidden_states import text_rows
from runner.drafts.target import Tap
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.sources import Published
from tests.lib.driver import facts_of
from tests.model.drafts.answers import DRAWN, GREEDY, PROMPT, Counting, answer, greedy, proposed
from tests.model.loading.stored import put


class Pair(NamedTuple):
    loaded: LoadedModel
    head: Head


Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pairs(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Models with the heads of their packages, whose weights are random: their drafts are hardly ever right."""
    found: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in found:
            opened = put(tmp_path_factory.mktemp("store"), name, published(name)).open()
            loaded = load(opened)
            drafter = load_head(opened, loaded)
            assert drafter is not None
            found[name] = Pair(loaded, drafter.head)
        return found[name]

    return get


@pytest.fixture(scope="module")
def right(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model that sees its last token only, and a head that does the same: its drafts are right."""
    opened = put(tmp_path_factory.mktemp("right"), "qwen3.5", published("qwen3.5")).open()
    loaded = load(opened)
    drafter = load_head(opened, loaded)
    assert drafter is not None
    head = drafter.head

    def silent(path: str, array: mx.array) -> mx.array:
        return (
            mx.zeros_like(array) if path.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else array
        )

    for module in (loaded.module, head.module):
        module.update(tree_map_with_path(silent, module.parameters()))
    width = head.target.norm.weight.shape[0]
    head.module.update(
        {
            "pre_fc_norm_embedding": {"weight": mx.ones(width)},
            "fc": {"weight": mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)},
            "norm": {"weight": head.target.norm.weight},
        }
    )
    return Pair(loaded, head)


def from_scratch(pair: Pair, text: list[int], count: int) -> list[int]:
    """The most probable drafts behind a text, by one forward over all of it for each."""
    tap = Tap([pair.head.target.norm], len(text))
    _, hidden = tap.observe(lambda: pair.loaded.logits(mx.array([text[:-1]]), pair.loaded.make_layers()))
    assert hidden is not None
    drafts: list[int] = []
    for _ in range(count):
        tokens = mx.array([[*text[1:], *drafts]])
        states = pair.head.states(hidden, tokens, pair.head.make_layers())
        drafts.append(cast("int", mx.argmax(pair.head.target.unembed(states)[0, -1]).item()))
        hidden = mx.concatenate([hidden, states[:, -1:]], axis=1)
    return drafts


@pytest.mark.parametrize("kind", DRAWN)
def test_drafts_that_are_right_are_all_accepted(kind: str, right: Pair) -> None:
    """They are drawn with the numbers, filters and penalties of the answer."""
    plain = answer(right.loaded, NullCache(facts_of(right.loaded)), PROMPT, 24, DRAWN[kind])
    drafted = answer(
        right.loaded, NullCache(facts_of(right.loaded)), PROMPT, 24, DRAWN[kind], HeadDrafter(right.head), 3
    )
    assert drafted.tokens == plain.tokens
    assert (drafted.drafted, drafted.accepted) == (18, 18)
    assert len(set(plain.tokens)) > 1


@pytest.mark.parametrize(("name", "most"), [("qwen3.5", 7), ("qwen3.5-moe", 1), ("qwen3-next", 3), ("nemotron-h", 3)])
def test_drafts_are_those_of_the_whole_text(name: str, most: int, pairs: Pairs) -> None:
    """The head's layers hold what is certain: neither a draft that was wrong nor one's own guess."""
    pair, seen = pairs(name), []

    def observe(session: Session, drafts: list[int]) -> None:
        seen.append(drafts)
        assert drafts == from_scratch(pair, session.recorded, len(drafts))

    answer(pair.loaded, NullCache(facts_of(pair.loaded)), PROMPT, 20, GREEDY, HeadDrafter(pair.head), most, observe)
    assert len(seen) > 2
    assert any(map(len, seen))


# What the drafter keeps.


def drafter_of(rows: int, layer: object, *, most_rows: int = 8, most_slots: int = 4096, pair: Pair) -> HeadDrafter:
    drafter = HeadDrafter(pair.head, most_rows, most_slots)
    drafter.saw(layer, 0, hidden(rows))
    return drafter


def slots_of(drafter: HeadDrafter, layer: object) -> int:
    return drafter._texts[layer].held


def hidden(rows: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, rows, 64), key=mx.random.key(seed))


def test_a_drafter_keeps_the_last_rows_only(pairs: Pairs) -> None:
    layer, pair = Counting(), pairs("qwen3.5")
    drafter = drafter_of(100, layer, pair=pair)
    assert drafter.nbytes == 8 * 64 * 4
    for start in range(100, 300):
        drafter.saw(layer, start, hidden(1, start))
    assert drafter.nbytes <= 16 * 64 * 4
    assert len(proposed(drafter, [layer], 300, [1] * 301, 3, greedy)) == 3
    assert slots_of(drafter, layer) <= 16


def test_layers_begin_again_when_they_are_full(pairs: Pairs) -> None:
    layer, pair = Counting(), pairs("qwen3.5")
    drafter, slots = drafter_of(4, layer, most_slots=10, pair=pair), []
    for end in range(5, 40):
        drafter.saw(layer, end - 1, hidden(1, end))
        assert len(proposed(drafter, [layer], end, [1] * (end + 1), 2, greedy)) == 2
        slots.append(slots_of(drafter, layer))
    assert max(slots) == 10
    assert slots.count(1) == 3


def test_the_same_place_is_drafted_again_without_reading(pairs: Pairs) -> None:
    layer = Counting()
    drafter = drafter_of(6, layer, pair=pairs("qwen3.5"))
    first = proposed(drafter, [layer], 6, [1] * 7, 3, greedy)
    assert proposed(drafter, [layer], 6, [1] * 7, 3, greedy) == first
    assert proposed(drafter, [layer], 6, [1] * 7, 5, greedy)[:3] == first


def test_nothing_is_drafted_where_the_text_is_not_known(pairs: Pairs) -> None:
    layer, pair = Counting(), pairs("qwen3.5")
    drafter = drafter_of(6, layer, pair=pair)
    text = [1] * 30
    assert proposed(drafter, [Counting()], 6, text[:7], 3, greedy) == []  # another answer
    assert proposed(drafter, [layer], 6, text[:9], 3, greedy) == []  # more than one token that the target has not seen
    assert proposed(drafter, [layer], 8, text[:9], 3, greedy) == []  # two tokens that only others have seen
    assert proposed(drafter, [], 6, text[:7], 3, greedy) == []
    assert len(proposed(drafter, [layer], 6, text[:7], 3, greedy)) == 3
    drafter.saw(layer, 8, hidden(2))  # behind a gap
    assert len(proposed(drafter, [layer], 10, text[:11], 3, greedy)) == 3
    assert slots_of(drafter, layer) == 2


def test_what_was_not_right_is_forgotten(pairs: Pairs) -> None:
    """A round of which one token was right, and an answer that was set back."""
    pair, text = pairs("qwen3.5"), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    layer, plain = Counting(), Counting()
    rows = hidden(9)
    ours, theirs = (HeadDrafter(pair.head) for _ in range(2))
    ours.saw(layer, 0, rows[:, :4])
    ours.saw(layer, 4, mx.concatenate([rows[:, 4:5], hidden(3, 7)], axis=1))
    ours.saw(layer, 5, rows[:, 5:])
    theirs.saw(plain, 0, rows)
    wanted = proposed(theirs, [plain], 9, text, 3, greedy)
    assert proposed(ours, [layer], 9, text, 3, greedy) == wanted
    ours.saw(layer, 0, rows)  # all of it once more
    assert proposed(ours, [layer], 9, text, 3, greedy) == wanted
    assert slots_of(ours, layer) == 9


def test_a_picture_is_not_read(pairs: Pairs) -> None:
    """What stands before it neither."""
    layer = Counting()
    drafter = drafter_of(8, layer, pair=pairs("qwen3.5"))
    assert len(proposed(drafter, [layer], 8, [1, 2, -5, -6, 3, 4, 5, 6, 7], 2, greedy)) == 2
    assert slots_of(drafter, layer) == 5
    drafter.saw(layer, 8, hidden(1))
    assert proposed(drafter, [layer], 9, [1, 2, -5, -6, 3, 4, 5, 6, 7, -8], 2, greedy) == []


def test_each_row_of_a_batch_is_followed_and_no_long_part_of_a_prompt(pairs: Pairs) -> None:
    pair = pairs("qwen3.5")
    drafter, prompts = HeadDrafter(pair.head), [PROMPT, PROMPT[3:], PROMPT * 4]
    forward, own = drafter.watch(pair.loaded.logits), [pair.loaded.make_layers() for _ in prompts]
    for prompt, layers in zip(prompts, own, strict=True):
        forward(mx.array([prompt]), layers)
    assert drafter.nbytes == len(PROMPT + PROMPT[3:]) * 64 * 4
    forward(mx.array([[1], [2]]), BatchedLayers(own[:2]).layers)
    seen = [drafter._texts[text_rows(layers)[0][0]] for layers in own[:2]]
    for text, prompt, token in zip(seen, prompts, (1, 2), strict=False):
        alone, layers = HeadDrafter(pair.head), pair.loaded.make_layers()
        alone.watch(pair.loaded.logits)(mx.array([[*prompt, token]]), layers)
        wanted = alone._texts[text_rows(layers)[0][0]].waiting(0, len(prompt) + 1)
        assert mx.allclose(text.waiting(0, len(prompt) + 1), wanted, atol=1e-4)
    forward(mx.array([[1]] * 9), BatchedLayers([own[0]] * 9).layers)
    assert seen[0].first_waiting(len(PROMPT) + 2) is None, "more than it drafts for"


def test_a_drafter_keeps_no_layers_of_the_target_alive(pairs: Pairs) -> None:
    layer = Counting()
    drafter = drafter_of(6, layer, pair=pairs("qwen3.5"))
    proposed(drafter, [layer], 6, [1] * 7, 2, greedy)
    alive = weakref.ref(layer)
    del layer
    assert alive() is None
    assert drafter.nbytes > 0
    drafter.free()
    assert drafter.nbytes == 0
