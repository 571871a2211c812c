"""Recurrent layers stand behind any token of a round, without another forward over what was right."""

from collections.abc import Callable
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.layers.scans import StateReads, watched
from runner.cache.layers.states import RecurrentState
from runner.cache.sequence import SequenceLayers
from runner.cache.single import NullCache
from runner.scan_calls import watchers
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import Tiny, tiny, words
from tests.lib.driver import ask_uncached
from tests.lib.kernels import in_front
from tests.lib.memory import held_bytes
from tests.lib.rounds import Drafting, closing
from tests.model.architectures.caching import packed

RECURRENT = (
    *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "granitemoehybrid"),
    *("jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "longcat_flash_ngram", "mamba", "mamba2"),
    *("nemotron_h", "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("recurrent_gemma", "rwkv7"),
)
"""All of mlx-lm's; `test_architectures` shows that there is no other."""
ROUNDED = ("bailing_hybrid", "bailing_moe_v3", "kimi_k3", "kimi_linear", "recurrent_gemma")
"""Their other layers round differently for other numbers of tokens: latent attention, and gates in blocks."""
EXACT = [name for name in RECURRENT if name not in ROUNDED]
KNOWN = [name for name in RECURRENT if in_front() or name not in ("jamba", "mamba")]
"""Without a kernel, the scan of Mamba 1 is a loop in a larger function."""


def recurrent(sequence: SequenceLayers) -> list[RecurrentState]:
    return [state for _, state in sequence.used if isinstance(state, RecurrentState)]


def close(ours: mx.array, right: mx.array, tolerance: float) -> bool:
    return bool(mx.allclose(ours, right, rtol=0, atol=tolerance * float(mx.abs(right).max())))


def check_rounds(model: Tiny, place: int) -> None:
    """Checks that the states within rounds are those that single steps leave, and so is what follows. `place` varies
    the lengths."""
    prompt = words((2, 20)[place % 2])
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


@pytest.mark.parametrize(("place", "name"), [*enumerate(KNOWN)], ids=KNOWN)
def test_a_layer_stands_behind_any_token_of_a_round(place: int, name: str) -> None:
    check_rounds(build(name), place)


@pytest.mark.parametrize("name", EXACT)
def test_states_in_a_round_are_those_of_a_forward_over_its_first_tokens(name: str) -> None:
    """To the bit."""
    if not in_front():
        pytest.skip("MLX's own kernels round differently for other numbers of tokens")
    model, prompt, said = packed(name), words(20), words(12, seed=3)
    for right in (1, 2, 5, 7):
        states = []
        for count in (8, right):
            with closing(Drafting(model, NullCache(model.facts), prompt, said)) as drafting:
                drafting.step()
                drafting.round(count, right) if count > 1 else drafting.step()
                states.append([array for state in recurrent(drafting.session.sequence) for array in state.arrays()])
        assert all(mx.array_equal(mine, other) for mine, other in zip(*states, strict=True))


@patch("runner.model.scans.functions.available", lambda *_, **__: False)
def test_a_layer_whose_scan_is_unknown_goes_back_to_the_mark() -> None:
    model, prompt = build("mamba"), words(9)
    with closing(Drafting(model, NullCache(model.facts), prompt, words(9, seed=3))) as drafting:
        drafting.step()
        drafting.draft(4, 2)
        assert not drafting.session.accept(2)
        assert drafting.session.position == 9


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_watched_in_rounds_only(fails: bool) -> None:
    model, index, contiguous, seen = tiny("qwen3_next"), mx.array.__getitem__, mx.contiguous, []

    def watching(tokens: mx.array, cache: list[object]) -> mx.array:
        seen.append((mx.array.__getitem__ is not index, mx.contiguous is not contiguous, len(watchers)))
        if fails and tokens.shape[1] == 4:
            raise MemoryError
        return model.model(tokens, cache=cache)

    watching.layers = model.model.layers  # type: ignore[attr-defined]
    said = words(9, seed=3)
    drafting = Drafting(model._replace(model=watching), NullCache(model.facts), words(9), said)  # type: ignore[arg-type]
    drafting.step()
    if fails:
        with pytest.raises(MemoryError):
            drafting.draft(4, 2)
    else:
        drafting.round(4, 2)
        drafting.step()
    *before, _ = outside = [(False, False, 0)] * len(seen)
    assert seen == [*before, (True, True, 1)] if fails else seen == [*outside[:-2], (True, True, 1), (False, False, 0)]
    drafting.session.close()
    assert (mx.array.__getitem__, mx.contiguous, watchers) == (index, contiguous, [])


Change = Callable[[list[mx.array]], None]


def reads_of(model: Tiny, after: Change) -> list[bool]:
    """Returns which recurrent layers know their states, where something changes those that a round leaves."""
    with closing(Drafting(model, NullCache(model.facts), words(9), words(9, seed=3))) as drafting:
        drafting.step()
        layers = [state.layer for state in recurrent(drafting.session.sequence)]
        reads = [StateReads(lambda layer=layer: layer.cache, 4) for layer in layers]  # type: ignore[misc]
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
    """A token keeps at most twelve vectors as wide as the model for each recurrent layer, about what RWKV 7 reads."""
    count, vector = 24, 32 * 4
    model, prompt = build(name), words(30)
    with closing(Drafting(model, NullCache(model.facts), prompt, words(60, seed=3))) as drafting:
        drafting.step()
        session = drafting.session
        layers = recurrent(session.sequence)
        before = held_bytes()
        drafting.draft(count, 1)
        mx.eval(session.state())
        kept = held_bytes() - before
        session.accept(0)
        small = 4096 * len(session.sequence.used)  # a page for each of so small arrays
        assert kept <= 12 * vector * count * len(layers) + 2 * sum(layer.nbytes for layer in layers) + small
