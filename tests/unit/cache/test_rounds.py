"""Rounds over fake layers: the trie afterwards is the one that steps of a single token leave.

Every step is checked in full by `Together`. Wrong drafts are tokens that no answer has: none may come into the trie.
"""

import pytest

from runner.cache import CACHE_KINDS, make_cache
from runner.cache.layer_interface import Miss
from runner.cache.sequence import SequenceLayers
from runner.cache.session import DecodeRows, Session
from tests.lib.breaking import breaking
from tests.lib.fakes import FAMILIES, FakeKV, FakeLayer, FakeRecurrentState, FakeWindow, facts_of_fakes
from tests.lib.story import Conversation, Every
from tests.lib.together import Client, Held, Together

WRONG = [90, 91, 92, 93, 94, 95, 96, 97]
PROMPT = [1, 2, 3, 4, 5, 6]
everyone = pytest.mark.parametrize("family", FAMILIES)
every_cache = pytest.mark.parametrize("kind", CACHE_KINDS)


def contents(users: Together) -> tuple[str, Held, list[int], int, int, int]:
    """The trie, what it holds, when its nodes were used, and the numbers that go with it."""
    sequences = users.cache.sequences
    assert all(token < WRONG[0] for node in users.nodes for token in node.tokens)
    used = [node.used for node in users.nodes]
    recorded = sequences.end.end if sequences.end else 0
    return users.shape, users.held, used, sequences.totals.ledger.count, users.cache.paged_bytes, recorded


def say_in_rounds(client: Client, answer: list[int], count: int, right: int, *, record_first: bool = False) -> None:
    """Says an answer in rounds over `count` tokens of which `right` are, the last one as far as it goes."""
    while answer:
        said, answer = answer[:right], answer[right:]
        client.draft(*said, *WRONG[: count - len(said)])
        if record_first:
            for token in said:
                client.record(token)
        client.accept(len(said), record=not record_first)


@everyone
@pytest.mark.parametrize(("count", "right", "length"), [(2, 1, 1), (3, 2, 2), (5, 5, 2), (8, 4, 9)])
def test_an_answer_in_rounds_leaves_the_trie_of_steps(family: str, count: int, right: int, length: int) -> None:
    plain, ours = Together(family, policy=Every(4)), Together(family, policy=Every(4))
    answer = list(range(20, 29))
    for record_first in (False, True):
        prompt = [*range(length), *([5] if record_first else [])]
        client = plain.begin(prompt).say(*answer)
        client.close()
        drafting = ours.begin(prompt).start()
        say_in_rounds(drafting, answer, count, right, record_first=record_first)
        assert drafting.session.recorded == client.session.recorded
        drafting.close()
        assert contents(ours) == contents(plain)
        for next_prompt in ([*prompt, *answer, 40, 41], prompt, [*prompt, *answer[:5], 50]):
            assert ours.turn(next_prompt).cached == plain.turn(next_prompt).cached
            assert contents(ours) == contents(plain)


@everyone
@pytest.mark.parametrize("known", [0, 1, 2, 4])
def test_a_client_that_leaves_in_a_round_leaves_none_of_its_drafts(family: str, known: int) -> None:
    """`known` of its tokens are recorded, as if the client left between the draws and `accept`. Only the first is
    surely what the layers hold: another token may have been drawn in place of a draft."""
    plain, ours = Together(family), Together(family)
    answer = [20, 21, 22, 23, 24, 25]
    client = ours.begin(PROMPT).say(*answer[:2]).draft(*answer[2:], *WRONG[:3])
    for token in answer[2 : 2 + known]:
        client.record(token)
    client.close()
    alone = plain.begin(PROMPT).say(*answer[:2])
    if family == "K" and known:  # the other layers stand where they did
        alone.say(answer[2])
    for token in answer[len(alone.session.recorded) - len(PROMPT) : 2 + known]:
        alone.record(token)
    alone.close()
    assert contents(ours) == contents(plain)
    longer = [*PROMPT, *answer, 30]
    assert ours.turn(longer).cached == plain.turn(longer).cached == 8 + (family == "K" and known > 0)


@everyone
@pytest.mark.parametrize(("prompt", "right"), [([*PROMPT, 20, 21], 0), ([*PROMPT[:3], 21], 3), ([21], 1)])
def test_what_others_come_back_to_is_copied_out_before_a_round(family: str, prompt: list[int], right: int) -> None:
    """A round that begins with the last token of a prompt, right after the layers were resumed."""
    users = Together(family)
    users.turn(PROMPT, [20])
    client = users.begin(prompt).read()
    client._draft([prompt[-1], 22, 23, *WRONG[:2]])
    client.accept(right, record=False)
    users.check()
    for token in (22, 23)[: max(0, right - 1)]:
        client.record(token)
    client.close()
    assert users.turn([*PROMPT, 20, 30]).matched == 7
    contents(users)


@everyone
@pytest.mark.parametrize("broken", ["count_forward", "revert"])
def test_a_session_that_cannot_go_back_has_failed(family: str, broken: str) -> None:
    users = Together(family)
    users.turn([9, 8, 7])
    client = users.begin(PROMPT).say(20).draft(21, *WRONG[:3])
    with breaking(SequenceLayers, broken, 0), pytest.raises(MemoryError):
        client.session.accept(1)
    users.clients.remove(client)
    assert client.session.failed
    client.session.close()
    users.check()
    assert users.cached(PROMPT) == 0
    client = users.begin(PROMPT).say(20).draft(21, *WRONG[:3])
    with breaking(SequenceLayers, broken, 0):
        client.close()
    assert users.cached(PROMPT) == 0


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_others_share_what_is_certain_while_a_round_is_open(family: str) -> None:
    prompt = list(range(50))
    users = Together(family)
    first = users.begin(prompt).say(60, 61).draft(62, *WRONG[:4])
    first.record(62)
    first.record(63)  # known to be right, but what the layers hold behind 62 is not
    shared = users.follows([*prompt, 60, 61, 62, 63, 70])
    assert not shared
    second = users.begin([*prompt, 60, 61, 62, 63, 70])
    assert second.session.cached == (52 if family == "K" else 0)
    users.cache.evict()
    users.check()
    first.accept(1, record=False)
    first.say()
    first.close()
    second.close()
    contents(users)


def session_of(kind: str, prompt: list[int], *layers: type[FakeLayer]) -> Session:
    session = make_cache(kind, facts_of_fakes(layers or (FakeKV, FakeWindow))).begin(prompt)
    see(session, prompt)
    return session


def see(session: Session, tokens: list[int]) -> None:
    with session.forward(len(tokens)):
        show(session, tokens)


def show(session: Session, tokens: list[int]) -> None:
    for layer in session.layers:
        assert isinstance(layer, FakeLayer)
        layer.see(tokens)


@every_cache
def test_a_session_in_a_round_computes_nothing_else(kind: str) -> None:
    session = session_of(kind, PROMPT)
    with session.draft_round(3):
        show(session, [7, *WRONG[:2]])
    assert (session.in_round, session.position) == (True, 6)
    for begin in (session.forward, session.draft_round):
        with pytest.raises(RuntimeError, match="a round to accept"), begin(2):
            raise AssertionError("begun")
    for count in (-1, 4):
        with pytest.raises(ValueError, match=f"{count} of the 3 tokens"):
            session.accept(count)
    other = DecodeRows(session)
    for rows, joined in ((DecodeRows(session_of(kind, PROMPT)), other), (other, DecodeRows(session_of(kind, PROMPT)))):
        with pytest.raises(RuntimeError, match="drafts in them"):
            rows.join([joined])
    assert session.accept(1) in (True, False)
    with pytest.raises(RuntimeError, match="no round"):
        session.accept(1)
    see(session, [8])
    session.close()
    with pytest.raises(RuntimeError, match="closed"), session.draft_round(2):
        raise AssertionError("begun")


@every_cache
@pytest.mark.parametrize("count", [-1, 0, 1])
def test_a_round_has_several_tokens(kind: str, count: int) -> None:
    session = session_of(kind, PROMPT)
    for ask in (session.sequence.mark, lambda count: session.draft_round(count).__enter__()):
        with pytest.raises(ValueError, match=f"over {count} tokens"):
            ask(count)
    see(session, [7])
    assert not session.failed


@every_cache
def test_layers_that_cannot_go_back_refuse_a_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRecurrentState, "markable", False)
    session = session_of(kind, PROMPT, *FAMILIES["R"])
    assert not session.sequence.markable
    with pytest.raises(TypeError, match="takes no marks"), session.draft_round(2):
        raise AssertionError("begun")
    see(session, [7])
    assert not session.failed


def test_a_single_entry_stands_where_its_record_ends() -> None:
    for family, cached in (("K", 9), ("S", 8), ("R", 8), ("P", 8)):
        users = Conversation(family)
        session = users.cache.begin(PROMPT)
        users.forward(session, PROMPT, PROMPT)
        for token in (20, 21):
            users.forward(session, [token], [*session.recorded, token])
            session.record(token)
        with session.draft_round(3):
            show(session, [22, *WRONG[:2]])
        session.record(22)
        session.close()
        users.check_closed()
        assert users.record == [*PROMPT, 20, 21, 22][:cached]
        again = users.cache.begin([*PROMPT, 20, 21, 22, 23])
        assert (again.cached, again.miss) == (cached, Miss.NONE)
        again.close()
