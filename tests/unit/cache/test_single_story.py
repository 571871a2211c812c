"""The single-entry cache over fake layers: what the users of a conversation do, and what that costs.

Families: K keys and values only, S with a window of 4, R with a recurrent layer, P recurrent layers only.
`turn(...).cached` of `.total` tokens came from the cache.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import logging
from collections.abc import Callable

import pytest

from runner.cache.layer_interface import Miss
from runner.cache.sequence import SequenceLayers
from tests.lib.fakes import FAMILIES
from tests.lib.story import CHUNK, CancelledError, Conversation

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
ANSWER = [20, 21]
everyone = pytest.mark.parametrize("family", FAMILIES)
recurrent = pytest.mark.parametrize("family", ["R", "P"])


def test_the_same_prompt_again_computes_one_token() -> None:  # scenario 3
    conversation = Conversation("K")
    first = conversation.turn(PROMPT)
    assert (first.matched, first.cached, first.miss) == (0, 0, Miss.EMPTY)
    session = conversation.turn(PROMPT)
    assert (session.matched, session.cached, session.miss) == (8, 7, Miss.NONE)


@pytest.mark.parametrize(("length", "cached"), [(2, 1), (3, 0), (8, 0)])
def test_a_window_goes_back_only_until_it_is_full(length: int, cached: int) -> None:  # scenario 3
    conversation = Conversation("S")
    conversation.turn(PROMPT[:length], ANSWER)
    session = conversation.turn(PROMPT[:length])
    assert session.cached == cached
    assert session.miss == (Miss.NONE if cached else Miss.WINDOW_PASSED)


@pytest.mark.parametrize(("family", "cached"), [("K", 5), ("S", 0), ("R", 0), ("P", 0)])
def test_a_divergence_keeps_the_common_prefix(family: str, cached: int) -> None:  # scenario 4
    conversation = Conversation(family)
    conversation.turn(PROMPT)
    session = conversation.turn([1, 2, 3, 4, 5, 11, 12, 13])
    assert (session.matched, session.cached) == (5, cached)


@everyone
def test_a_cancelled_prefill_is_continued(family: str) -> None:  # scenario 10
    conversation = Conversation(family)
    prompt = list(range(1, 4 * CHUNK + 3))
    conversation.cancelled_prefill(prompt, after_chunks=2)
    assert conversation.record == prompt[: 2 * CHUNK]
    assert conversation.turn(prompt).cached == 2 * CHUNK


def _gone_at(stop: int) -> Callable[[int], None]:
    def hook(k: int) -> None:
        if k == stop:
            raise CancelledError

    return hook


@everyone
@pytest.mark.parametrize("stop", range(3))
def test_a_token_that_was_never_recorded_is_not_claimed(family: str, stop: int) -> None:  # scenario 11
    """The forward of a token ran, and something broke before the token was recorded: the layers are one ahead."""
    conversation = Conversation(family)
    answer = [20, 21, 22]
    conversation.turn(PROMPT, answer, before_record=_gone_at(stop))
    kept = 8 + stop if family == "K" else 0
    assert conversation.record == (PROMPT + answer)[:kept]
    assert conversation.turn([*PROMPT, *answer, 9]).cached == kept


def test_a_layer_ahead_at_close_is_rewound() -> None:  # scenario 12
    conversation = Conversation("K")

    def ahead(sequence: SequenceLayers) -> None:
        conversation.layers[0].see([99])

    conversation.turn(PROMPT, ANSWER, before_close=ahead)
    assert conversation.record == PROMPT + ANSWER
    assert conversation.turn([*PROMPT, *ANSWER, 9]).cached == 10


@pytest.mark.parametrize("family", ["S", "R", "P"])
def test_a_layer_ahead_at_close_that_cannot_go_back_frees_all(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:  # scenario 12
    conversation = Conversation(family)

    def ahead(sequence: SequenceLayers) -> None:
        conversation.layers[1].see([99])
        sequence.states[1].count_tokens(1)

    with caplog.at_level(logging.WARNING):
        conversation.turn(PROMPT, ANSWER, before_close=ahead)
    assert conversation.record == []
    assert "cannot be levelled to 10 tokens" in caplog.records[-1].__dict__["attributes"]["why"]
    assert conversation.turn([*PROMPT, *ANSWER, 9]).cached == 0


@everyone
@pytest.mark.parametrize("after_chunks", range(3))
def test_after_a_failed_forward_nothing_is_believed(
    family: str, after_chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    conversation = Conversation(family)
    conversation.turn(PROMPT, ANSWER)
    longer = [*PROMPT, *ANSWER, *range(40, 60)]
    conversation.failed_forward(longer, after_chunks)
    assert conversation.record == []
    assert caplog.records[-1].__dict__["attributes"]["why"] == "a forward failed"
    assert conversation.turn(longer).cached == 0


@everyone
def test_a_state_that_cannot_be_computed_at_close_is_freed(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last forwards may never have been evaluated before."""
    conversation = Conversation(family)

    def settle(sequence: SequenceLayers) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(SequenceLayers, "evaluate", settle)
        conversation.turn(PROMPT, ANSWER)
    assert conversation.record == []
    assert "cannot be computed: no memory" in caplog.records[-1].__dict__["attributes"]["why"]
    assert conversation.turn(PROMPT).cached == 0


@everyone
def test_another_salt_shares_nothing(family: str) -> None:  # scenario 15
    conversation = Conversation(family)
    conversation.turn(PROMPT, ANSWER, salt="adapter-a")
    session = conversation.turn([*PROMPT, *ANSWER, 9], salt="adapter-b")
    assert (session.matched, session.cached, session.miss) == (0, 0, Miss.SALT)
    assert conversation.turn([*PROMPT, *ANSWER, 9, *ANSWER, 9], salt="adapter-b").cached == 13
    assert conversation.turn([*PROMPT, *ANSWER, 9, *ANSWER, 9]).miss == Miss.SALT
    conversation.cache.detach()
    assert conversation.turn(PROMPT).miss == Miss.EMPTY
