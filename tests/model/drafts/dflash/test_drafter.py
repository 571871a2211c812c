"""A draft is made behind the text that it follows, and no answer is another for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from runner.cache.session import Session
from runner.cache.single import NullCache
from runner.drafts.dflash.dflash_config import read_dflash_config
from runner.drafts.dflash.drafter import BlockDrafter, BlockText
from runner.drafts.dflash.fitting import block_target, load_dflash
from runner.drafts.kinds import open_draft
from runner.drafts.target import Tap
from runner.model import open_model
from runner.model.weights.loading import load
from scripts.tools.models.dflash import BLOCK, DFLASH2, DRAFT, DSPARK, GLIMMER, LAGUNA, dflash_config, write_dflash
from scripts.tools.models.sources import write_source
from scripts.tools.models.tiny import words
from tests.lib.driver import facts_of
from tests.model.drafts.answers import DRAWN, GREEDY, Counting, answer, greedy, proposed, standing
from tests.model.drafts.dflash.tiny_drafts import Prompted, from_scratch, tiny_draft, tiny_target

PROMPT = words(40)
SLIDING: dict[str, object] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.mark.parametrize(
    ("name", "most", "changes", "architecture"),
    [
        ("llama", 1, {}, DRAFT),
        ("gemma3", 3, SLIDING, DRAFT),
        ("qwen3_next", 5, {}, DRAFT),
        ("llama", 5, SLIDING, DRAFT),
        ("llama", 5, SLIDING, DFLASH2),
        ("qwen3_next", 6, {}, DSPARK),
    ],
)
def test_drafts_are_those_of_the_whole_text(
    name: str, most: int, changes: dict[str, object], architecture: str
) -> None:
    """The context holds what is certain, all of it: nothing of a draft that was wrong."""
    loaded, draft = tiny_target(name), tiny_draft(name, changes, architecture)
    lengths, furthest = list[int](), 0.0
    plain = answer(loaded, NullCache(facts_of(loaded)), PROMPT, 20, GREEDY)
    drafter = Prompted(draft, lambda text: plain.tokens[len(text) - len(PROMPT) :])

    def observe(session: Session, _: list[int]) -> None:
        nonlocal furthest
        found = mx.concatenate(drafter.logits)
        lengths.append(len(found))
        assert mx.allclose(found, from_scratch(draft, loaded, session.recorded, len(found)), atol=1e-3)
        shorter = from_scratch(draft, loaded, session.recorded[1:], len(found))
        furthest = max(furthest, cast("float", mx.abs(mx.nan_to_num(found - shorter)).max().item()))

    answer(loaded, NullCache(facts_of(loaded)), PROMPT, 20, GREEDY, drafter, most, observe)
    assert len(lengths) > 4
    assert max(lengths) == most
    assert furthest > 0.01  # what the draft sees makes a difference


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("laguna", LAGUNA),
        ("muse-glimmer", GLIMMER),
        ("gemma4-text", DRAFT),
        ("gpt-oss", DRAFT),
        ("muse-glimmer", DFLASH2),
        ("qwen3.5", DFLASH2),
        ("lfm2", DSPARK),
        ("nemotron-h", DSPARK),
    ],
)
def test_published_families_are_drafted(name: str, architecture: str, tmp_path: Path) -> None:
    directory = write_source(tmp_path / "target", name)
    loaded = load(open_model(str(directory), directory))
    vocab_size = loaded.logits(mx.array([[1]]), loaded.make_layers()).shape[-1]
    blocks = write_dflash(
        tmp_path / "draft", architecture, {} if architecture == GLIMMER else {"vocab_size": vocab_size}
    )
    draft, options = load_dflash(open_draft(str(blocks), blocks).model, loaded).dflash, DRAWN["drawn"]
    plain = answer(loaded, NullCache(facts_of(loaded)), PROMPT, 16, options)
    drafter = Prompted(draft, lambda text: plain.tokens[len(text) - len(PROMPT) :])
    drafted = answer(loaded, NullCache(facts_of(loaded)), PROMPT, 16, options, drafter, 4)
    assert drafted.tokens == plain.tokens
    assert drafted.drafted > drafted.accepted >= 4


@pytest.mark.parametrize("name", ["muse-glimmer", "gemma4-text", "qwen3.5", "laguna"])
def test_logits_are_on_the_scale_of_the_target(name: str, tmp_path: Path) -> None:
    """Drafts are drawn with the answer's own numbers, which says nothing on another scale."""
    directory = write_source(tmp_path, name)
    loaded = load(open_model(str(directory), directory))
    target = block_target(read_dflash_config(dflash_config(DRAFT, {"vocab_size": None}), DRAFT), loaded)
    tap, tokens = Tap([target.norm], 3), mx.array([[1, 2, 3]])
    wanted, hidden = tap.observe(lambda: loaded.module(tokens))
    assert hidden is not None
    assert mx.allclose(target.unembed(hidden), wanted, atol=1e-5)
    table = cast("Module", getattr(loaded.module, "language_model", loaded.module)).model.embed_tokens
    assert mx.allclose(target.embed(tokens), (8.0 if name == "gemma4-text" else 1.0) * table(tokens))


# What the drafter keeps.


TEXT = [1] * 400


def features(rows: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, rows, 64), key=mx.random.key(seed))


def drafter_of(rows: int, layer: object, **bounds: int) -> BlockDrafter:
    drafter = BlockDrafter("a draft", tiny_draft("llama"), **bounds)
    drafter.saw(layer, 0, features(rows))
    return drafter


def drafts(drafter: BlockDrafter, layer: object, position: int, most: int = 3) -> Sequence[int]:
    return proposed(drafter, [layer], position, TEXT[: position + 1], most, greedy)


def reads(drafter: BlockDrafter, layer: object, position: int, *, briefly: bool = False) -> bool:
    return drafter.read_texts([standing([layer], position, TEXT)], briefly=briefly)


def text_of(drafter: BlockDrafter, layer: object) -> BlockText:
    return drafter._texts[layer]


def scores(drafter: BlockDrafter, layer: object, position: int, text: Sequence[int] = TEXT) -> mx.array:
    """The logits [5, V] of a block."""
    found = list[mx.array]()

    def draw(logits: mx.array) -> mx.array:
        found.append(logits)
        return greedy(logits)

    assert len(proposed(drafter, [layer], position, text[: position + 1], 5, draw)) == 5
    return mx.concatenate(found)


def same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, atol=1e-4))


@pytest.mark.parametrize(("changes", "kept"), [({}, 20), ({**SLIDING, "layer_types": ["sliding_attention"] * 2}, 9)])
def test_a_context_never_grows_beyond_its_bound(changes: dict[str, object], kept: int) -> None:
    """It has as many tokens as its layers see back, or as are allowed."""
    layer, drafter = Counting(), BlockDrafter("a draft", tiny_draft("llama", changes), most_rows=4, context_tokens=20)
    held, most = [], 0
    for end in range(1, 120):
        drafter.saw(layer, end - 1, features(1, end))
        assert not reads(drafter, layer, end)
        assert len(drafts(drafter, layer, end, 2)) == 2
        held.append(text_of(drafter, layer).held)
        most = max(most, drafter.nbytes)
    assert max(held) <= 2 * kept
    assert min(held[40:]) > kept
    assert most <= 2 * 512 * 512  # of 256 tokens at a time, and those that are being cut


def test_what_waits_is_read_in_parts() -> None:
    """Until little enough is left to be read with the block; the drafts are the same."""
    layer, other = Counting(), Counting()
    drafter, at_once = drafter_of(200, layer), drafter_of(200, other)
    stops = []
    while reads(drafter, layer, 200):
        stops.append(text_of(drafter, layer).at)
    assert stops == [64, 128, 192]
    assert same(scores(drafter, layer, 200), scores(at_once, other, 200))
    assert not reads(drafter, layer, 200)


def test_a_text_that_waits_to_be_read_holds_up_no_other_one() -> None:
    short, long = Counting(), Counting()
    drafter = drafter_of(9, short)
    drafter.saw(long, 0, features(200, 1))
    answers = [standing([short], 9, TEXT[:10]), standing([long], 200, TEXT[:201])._replace(row=1)]
    wanted = [drafts(drafter_of(9, short), short, 9)]
    for _ in range(3):
        assert not drafter.read_texts(answers, briefly=False)
        assert [*map(list, drafter.propose(answers, [], 3))] == [*wanted, []]
    alone = BlockDrafter("a draft", tiny_draft("llama"))
    alone.saw(long, 0, features(200, 1))
    wanted.append(drafts(alone, long, 200))
    assert not drafter.read_texts(answers, briefly=False)
    assert [*map(list, drafter.propose(answers, [], 3))] == wanted


def test_for_a_single_try_little_is_read() -> None:
    layer, other = Counting(), Counting()
    drafter, short = drafter_of(100, layer), BlockDrafter("a draft", tiny_draft("llama"))
    assert not reads(drafter, layer, 90, briefly=True)
    short.saw(other, 26, features(100)[:, 26:90])
    assert same(scores(drafter, layer, 90), scores(short, other, 90))
    assert (text_of(drafter, layer).start, text_of(drafter, layer).at) == (26, 90)


def test_a_block_is_never_longer_than_the_draft_knows() -> None:
    layer = Counting()
    assert len(drafts(drafter_of(6, layer), layer, 6, 50)) == BLOCK - 1


def test_the_same_place_is_drafted_again_without_reading() -> None:
    layer = Counting()
    drafter = drafter_of(6, layer)
    assert same(scores(drafter, layer, 6), scores(drafter, layer, 6))
    assert text_of(drafter, layer).at == 6


def test_nothing_is_drafted_where_the_text_is_not_known() -> None:
    layer = Counting()
    drafter = drafter_of(6, layer)
    text = [1] * 30
    assert proposed(drafter, [Counting()], 6, text[:7], 3, greedy) == []  # another answer
    assert proposed(drafter, [layer], 6, text[:9], 3, greedy) == []  # more than one token that the target has not seen
    assert proposed(drafter, [layer], 8, text[:9], 3, greedy) == []  # two tokens that only others have seen
    assert proposed(drafter, [], 6, text[:7], 3, greedy) == []
    assert proposed(drafter, [layer], 6, [*text[:6], -5], 3, greedy) == []  # behind a picture
    assert proposed(BlockDrafter("a draft", tiny_draft("llama")), [layer], 0, text[:1], 3, greedy) == []
    assert len(drafts(drafter, layer, 6)) == 3
    drafter.saw(layer, 8, features(2))  # behind a gap
    assert len(drafts(drafter, layer, 10)) == 3
    assert text_of(drafter, layer).start == 8
    drafter.saw(layer, 10, features(1))
    drafter.free()
    assert drafter.nbytes == 0


def test_what_was_not_right_is_forgotten() -> None:
    """A round of which one token was right, and an answer that was set back, within its context and beyond."""
    layer, plain, rows = Counting(), Counting(), features(9)
    ours, theirs = (BlockDrafter("a draft", tiny_draft("llama")) for _ in range(2))
    ours.saw(layer, 0, rows[:, :4])
    assert len(drafts(ours, layer, 4)) == 3
    ours.saw(layer, 4, mx.concatenate([rows[:, 4:5], features(3, 7)], axis=1))
    assert len(drafts(ours, layer, 5)) == 3
    ours.saw(layer, 5, features(4, 8))
    assert len(drafts(ours, layer, 9)) == 3
    ours.saw(layer, 5, rows[:, 5:])
    theirs.saw(plain, 0, rows)
    wanted = scores(theirs, plain, 9)
    assert same(scores(ours, layer, 9), wanted)
    assert text_of(ours, layer).start == 0
    ours.saw(layer, 0, rows)  # all of it once more
    assert same(scores(ours, layer, 9), wanted)


def test_the_layers_of_another_answer_bring_no_context_of_this_one() -> None:
    """A cache gives its layers to the next answer, which may begin otherwise and be just as long."""
    layer, other, rows = Counting(), Counting(), features(8)
    ours, theirs = drafter_of(6, layer), BlockDrafter("a draft", tiny_draft("llama"))
    assert len(drafts(ours, layer, 6)) == 3
    text = [2] * 9
    for drafter, each in ((ours, layer), (theirs, other)):
        drafter.saw(each, 6, rows[:, 6:])
    wanted = scores(theirs, other, 8, text)
    assert same(scores(ours, layer, 8, text), wanted)
    assert text_of(ours, layer).start == 6
