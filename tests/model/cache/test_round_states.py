"""Recurrent layers stand behind any token of a round, without another forward over what was right."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from runner.cache.layers.scans import SCANS, RoundReads, watched
from runner.cache.layers.states import RecurrentState
from runner.cache.sequence import SequenceLayers
from runner.cache.single import NullCache
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import Tiny, tiny, words
from tests.lib.driver import ask_uncached
from tests.lib.memory import held_bytes
from tests.lib.rounds import Drafting, closing

import mlx_lm.models  # isort: skip

KNOWN = (*(name for _, modules in SCANS.values() for name in modules), "qwen3_5_moe", "lfm2", "lfm2_moe")
"""The last two have convolutions alone."""
UNKNOWN = ("jamba", "mamba")


def recurrent(sequence: SequenceLayers) -> list[RecurrentState]:
    return [state for _, state in sequence.used if isinstance(state, RecurrentState)]


def close(ours: mx.array, right: mx.array, tolerance: float) -> bool:
    return bool(mx.allclose(ours, right, rtol=0, atol=tolerance * float(mx.abs(right).max())))


@pytest.mark.parametrize(("place", "name"), [*enumerate(KNOWN)], ids=KNOWN)
def test_a_layer_stands_behind_any_token_of_a_round(place: int, name: str) -> None:
    """Its states are those that single steps leave, and so is what follows."""
    model, prompt = build(name), words((2, 20)[place % 2])
    plain = ask_uncached(model, prompt, say=12)
    for right in (0, 1 + place % 3, 4 + place % 4, 8):
        drafting = Drafting(model, NullCache(model.facts), prompt, plain.tokens)
        steps = Drafting(model, NullCache(model.facts), prompt, plain.tokens)
        with closing(drafting), closing(steps):
            for each in (drafting, steps):
                each.step()
            drafting.draft(8, right)
            assert drafting.session.accept(right)
            drafting.record(right)
            for _ in range(right):
                steps.step()
            pairs = zip(recurrent(drafting.session.sequence), recurrent(steps.session.sequence), strict=True)
            for ours, theirs in pairs:
                assert ours.offset == theirs.offset
                for mine, other in zip(ours.arrays(), theirs.arrays(), strict=True):
                    assert mine.dtype == other.dtype
                    assert close(mine, other, model.tolerance)
            for each in (drafting, steps):
                each.step()
            assert close(drafting.logits[-1], steps.logits[-1], model.tolerance)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_layer_whose_scan_is_unknown_goes_back_to_the_mark(name: str) -> None:
    model, prompt = build(name), words(9)
    with closing(Drafting(model, NullCache(model.facts), prompt, words(9, seed=3))) as drafting:
        drafting.step()
        drafting.draft(4, 2)
        assert not drafting.session.accept(2)
        assert drafting.session.position == 9


def test_every_module_that_calls_a_scan_is_known() -> None:
    """A new mlx-lm may have more of them."""
    for folder in mlx_lm.models.__path__:
        for path in Path(folder).glob("*.py"):
            for name, (_, modules) in SCANS.items():
                calls = f"import {name}" in path.read_text() and path.stem not in ("gated_delta", "ssm")
                assert calls == (path.stem in modules), (path.stem, name)


def functions() -> list[object]:
    """The functions that a round replaces, as they are now."""
    for _, modules in SCANS.values():
        for name in modules:
            importlib.import_module(f"mlx_lm.models.{name}")
    found: list[object] = [mx.concatenate]
    for name, (_, modules) in SCANS.items():
        found += [getattr(sys.modules[f"mlx_lm.models.{module}"], name) for module in modules]
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_functions_are_replaced_in_rounds_only(fails: bool) -> None:
    model, before, seen = tiny("qwen3_next"), functions(), []

    def watching(tokens: mx.array, cache: list[object]) -> mx.array:
        seen.append([ours is not right for ours, right in zip(functions(), before, strict=True)])
        if fails and tokens.shape[1] == 4:
            raise MemoryError
        return model.model(tokens, cache=cache)

    watching.layers = model.model.layers  # type: ignore[attr-defined]
    said = words(9, seed=3)
    drafting = Drafting(model._replace(model=watching), NullCache(model.facts), words(9), said)  # type: ignore[arg-type]
    drafting.step()
    assert not any(map(any, seen))
    seen.clear()
    if fails:
        with pytest.raises(MemoryError):
            drafting.draft(4, 2)
    else:
        drafting.round(4, 2)
        drafting.step()
    assert [all(seen[0]), *map(any, seen[1:])] == ([True] if fails else [True, False])
    drafting.session.close()
    assert functions() == before


Change = Callable[[list[mx.array]], None]


def reads_of(model: Tiny, after: Change) -> list[bool]:
    """Returns which recurrent layers know their states, where something changes those that a round leaves."""
    with closing(Drafting(model, NullCache(model.facts), words(9), words(9, seed=3))) as drafting:
        drafting.step()
        layers = [state.layer for state in recurrent(drafting.session.sequence)]
        reads = [RoundReads(lambda layer=layer: layer.cache, 4) for layer in layers]  # type: ignore[misc]
        with watched(reads):
            model.model(mx.array([[1, 2, 3, 4]]), cache=drafting.session.layers)
            after(layers[0].cache)  # type: ignore[arg-type]
        return [each.known for each in reads]


def test_a_state_that_came_another_way_is_not_known() -> None:
    model = tiny("mamba2")

    def scaled(states: list[mx.array]) -> None:
        states[1] = states[1] * 0.5

    def longer(states: list[mx.array]) -> None:
        states[0] = mx.concatenate([states[0], states[0]], axis=1)

    assert reads_of(model, lambda _: None) == [True, True]
    assert reads_of(model, scaled) == [False, True]
    assert reads_of(model, longer) == [False, True]


@pytest.mark.parametrize("name", KNOWN)
def test_a_round_keeps_little_beside_the_layers(name: str) -> None:
    """A token keeps four times the bytes of its row in the states of the convolutions: the row itself, what comes out
    of the convolutions, and the projection that row and gates are parts of."""
    count = 24
    model, prompt = build(name), words(30)
    with closing(Drafting(model, NullCache(model.facts), prompt, words(60, seed=3))) as drafting:
        drafting.step()
        session = drafting.session
        states = [x for state in recurrent(session.sequence) for x in state.arrays()]
        read = sum(x.nbytes + 4 * count * (x.nbytes // x.shape[1]) for x in states if x.ndim == 3)
        before = held_bytes()
        drafting.draft(count, 1)
        mx.eval(session.state())
        kept = held_bytes() - before
        session.accept(0)
        small = 4096 * len(session.sequence.used)  # a page for each of so small arrays
        assert kept <= read + 2 * sum(x.nbytes for x in states) + small
