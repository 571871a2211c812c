"""Layers that go back after a round: what they hold then is what single steps over the right tokens leave."""

import mlx.core as mx
import pytest

from runner.cache.layers.adapter import LayerState, Mark
from runner.cache.layers.snapshot import complete

from mlx_lm.models.cache import KVCache, RotatingKVCache  # isort: skip

from tests.lib.layer_caches import adapted, allocated, append, held, layer, positions, taken, write

MARKABLE = ("plain", "quantized", "exact", "window", "chunk", "arrays")
WRONG = 800
"""The position that the first wrong draft claims."""

every_kind = pytest.mark.parametrize("kind", MARKABLE)
# Windows and chunks of 8: not full, full by the round, just full, beyond.
places = pytest.mark.parametrize("begin", [1, 7, 8, 30])


def run(state: LayerState, count: int, right: int) -> Mark:
    """Runs a round over `count` tokens of which the first are right."""
    mark = state.mark(count)
    complete(state.page_out())
    drafts = [positions(state.offset, right), positions(WRONG, count - right)]
    append(state.layer, mx.concatenate(drafts, axis=-2))
    mx.eval(state.arrays())
    state.count_tokens(count)
    return mark


def take_back(state: LayerState, mark: Mark, right: int) -> bool:
    """Goes back to behind the right tokens, or to before the round. Returns False for the latter."""
    to = mark.offset + right
    direct = state.can_revert(mark, to)
    assert state.can_revert(mark, mark.offset)
    state.revert(mark, to if direct else mark.offset)
    return direct


def stepped(kind: str, begin: int, at_once: bool, more: int) -> LayerState:
    state = layer(kind)
    write(state, begin, at_once)
    write(state, more, at_once=False)
    return state


@every_kind
@places
@pytest.mark.parametrize(("count", "at_once"), [(2, True), (5, False), (9, True)])
def test_a_layer_that_went_back_holds_what_steps_leave(kind: str, count: int, begin: int, at_once: bool) -> None:
    for right in {0, 1, count // 2, count - 1, count}:
        state, plain = stepped(kind, begin, at_once, 0), stepped(kind, begin, at_once, right)
        direct = take_back(state, run(state, count, right), right)
        assert direct or kind in ("window", "arrays")
        if not direct:
            assert (state.offset, held(state)) == (begin, held(stepped(kind, begin, at_once, 0)))
            write(state, right, at_once=right > 1)
        assert (state.offset, held(state)[-8:]) == (begin + right, held(plain)[-8:])
        for length in (1, 4, 1):  # and goes on as if nothing had been
            ours, theirs = write(state, length), write(plain, length)
            assert sorted(ours)[-8:] == sorted(theirs)[-8:]
        assert held(state)[-8:] == held(plain)[-8:]


@every_kind
@places
def test_rounds_follow_each_other(kind: str, begin: int) -> None:
    state = layer(kind)
    write(state, begin)
    at = begin
    for count, right in ((2, 1), (5, 5), (3, 2), (9, 1), (4, 0), (2, 2), (5, 3)) * 3:
        if not take_back(state, run(state, count, right), right):
            assert state.offset == at
            if right == 1:
                write(state, 1)
            else:
                assert take_back(state, run(state, right, right), right)
        at += right
        assert state.offset == at
        assert held(state)[-8:] == list(range(max(0, at - 8), at))


@pytest.mark.parametrize(("begin", "right"), [(7, 1), (7, 3), (8, 2), (30, 1), (30, 3)])
def test_a_full_window_goes_back_to_after_any_right_token(begin: int, right: int) -> None:
    """The write of a round keeps what its first token could look at, and every later one."""
    state = layer("window")
    write(state, begin, at_once=False)
    assert take_back(state, run(state, 4, right), right)
    assert held(state) == list(range(max(0, begin + right - 8), begin + right))


@pytest.mark.usefixtures("exact_bytes")
def test_a_mark_keeps_no_layer_from_writing_in_place() -> None:
    """A reference to the buffer would cost a copy of it in each round."""
    layer_cache = KVCache()
    state = adapted(layer_cache)
    write(state, 10_000)

    def work() -> None:
        for _ in range(4):
            mark = state.mark(8)
            layer_cache.update_and_fetch(positions(0, 8), positions(0, 8))
            mx.eval(state.arrays())
            assert take_back(state, mark, 3)

    _, peak = allocated(work)
    assert peak < state.nbytes / 10


def test_a_class_that_is_unknown_takes_no_marks() -> None:
    for state in (layer("generic"), adapted(RotatingKVCache(8, 2))):
        write(state, 5)
        assert not state.markable
        with pytest.raises(TypeError, match="GenericState takes no marks"):
            state.mark(3)


@pytest.mark.parametrize(
    ("kind", "begin", "refused"), [("arrays", 5, (-1, 4, 6, 9, 11)), ("window", 20, (0, 12, 19, 26))]
)
def test_a_state_and_a_full_window_go_nowhere_but_to_the_round(kind: str, begin: int, refused: tuple[int, ...]) -> None:
    state = layer(kind)
    write(state, begin)
    mark = run(state, 5, 1)
    for to in refused:
        assert not state.can_revert(mark, to)
        with pytest.raises(ValueError, match=f"at {begin + 5} tokens cannot go back to {to}"):
            state.revert(mark, to)
    assert state.offset == begin + 5


@pytest.mark.parametrize("kind", ["window", "arrays"])
def test_what_is_live_in_a_layer_is_not_destroyed_by_going_back(kind: str) -> None:
    state = layer(kind)
    write(state, 20)
    mark = run(state, 5, 5)
    taken(state, 24)
    for to in (20, 22) if kind == "window" else (20,):
        with pytest.raises(RuntimeError, match="live in it"):
            state.revert(mark, to)
