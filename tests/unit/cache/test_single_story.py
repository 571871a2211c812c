"""The single-entry cache over fake layers: what the users of a conversation do, and what that costs.

Families: K keys and values only, S with a window of 4, R with a recurrent layer, P recurrent layers only.
`turn(...).cached` of `.total` tokens came from the cache. Scenarios: docs/internals/cache.md, 8.
"""

import pytest

from runner.cache.layer_interface import Miss
from runner.cache.sequence import SequenceLayers
from tests.lib.breaking import breaking
from tests.lib.fakes import FAMILIES
from tests.lib.story import CHUNK, CancelledError, Conversation

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
ANSWER = [20, 21]
OTHER = [1, 2, 3, 4, 5, 11, 12, 13]
everyone = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize(
    ("family", "first", "prompt", "matched", "cached", "miss"),
    [
        ("K", PROMPT, PROMPT, 8, 7, Miss.NONE),  # scenario 3
        ("S", PROMPT[:2], PROMPT[:2], 2, 1, Miss.NONE),
        ("S", PROMPT[:3], PROMPT[:3], 3, 0, Miss.WINDOW_PASSED),
        ("S", PROMPT, PROMPT, 8, 0, Miss.WINDOW_PASSED),
        ("K", PROMPT, OTHER, 5, 5, Miss.NONE),  # scenario 4
        ("S", PROMPT, OTHER, 5, 0, Miss.WINDOW_PASSED),
        ("R", PROMPT, OTHER, 5, 0, Miss.NON_TRIMMABLE),
        ("P", PROMPT, OTHER, 5, 0, Miss.NON_TRIMMABLE),
    ],
)
def test_the_next_prompt_gets_the_common_prefix_if_all_layers_go_back(
    family: str, first: list[int], prompt: list[int], matched: int, cached: int, miss: Miss
) -> None:
    conversation = Conversation(family)
    session = conversation.turn(first, ANSWER)
    assert (session.matched, session.cached, session.miss) == (0, 0, Miss.EMPTY)
    session = conversation.turn(prompt)
    assert (session.matched, session.cached, session.miss) == (matched, cached, miss)


@everyone
def test_a_cancelled_prefill_is_continued(family: str) -> None:  # scenario 10
    conversation = Conversation(family)
    prompt = list(range(1, 4 * CHUNK + 3))
    conversation.cancelled_prefill(prompt, after_chunks=2)
    assert conversation.record == prompt[: 2 * CHUNK]
    assert conversation.turn(prompt).cached == 2 * CHUNK


@everyone
@pytest.mark.parametrize("stop", range(3))
def test_a_token_that_was_never_recorded_is_not_claimed(family: str, stop: int) -> None:  # scenario 11
    """The forward of a token ran, and something broke before the token was recorded: the layers are one ahead."""
    conversation = Conversation(family)
    answer = [20, 21, 22]

    def gone(k: int) -> None:
        if k == stop:
            raise CancelledError

    conversation.turn(PROMPT, answer, before_record=gone)
    kept = 8 + stop if family == "K" else 0
    assert conversation.record == (PROMPT + answer)[:kept]
    assert conversation.turn([*PROMPT, *answer, 9]).cached == kept


@everyone
def test_a_layer_ahead_at_close_is_rewound_or_frees_all(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:  # scenario 12
    conversation = Conversation(family)

    def ahead(sequence: SequenceLayers) -> None:
        conversation.layers[1].see([99])
        sequence.states[1].count_tokens(1)

    conversation.turn(PROMPT, ANSWER, before_close=ahead)
    assert conversation.record == ([*PROMPT, *ANSWER] if family == "K" else [])
    if family != "K":
        assert "cannot be levelled to 10 tokens" in caplog.records[-1].__dict__["attributes"]["why"]
    assert conversation.turn([*PROMPT, *ANSWER, 9]).cached == (10 if family == "K" else 0)


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
def test_a_state_that_cannot_be_computed_at_close_is_freed(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last forwards may never have been evaluated before."""
    conversation = Conversation(family)
    with breaking(SequenceLayers, "evaluate", 0):
        conversation.turn(PROMPT, ANSWER)
    assert conversation.record == []
    assert "cannot be computed: in evaluate, broken on purpose" in caplog.records[-1].__dict__["attributes"]["why"]
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
