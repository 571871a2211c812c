"""Whatever several users do at the same time, over fake layers: `Together` checks all of it after every step.

Hypothesis invents them. They begin with prompts that share any prefix, wait for each other or do not, read, speak,
leave at any point; forwards break, the cache itself breaks, memory is short. Answers may come in rounds: others go on
while a round is open, and whoever is in one may leave or fail. Wrong drafts are tokens that nobody says, so that any in
the trie are noticed.

`test_the_machine_notices_a_draft` and `..._whose_layers_are_whose` show that one draft which stays, or one moved
snapshot, does not pass.
"""

from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runner.cache.checkpoints import CheckpointPolicy
from tests.lib.fakes import FAMILIES
from tests.lib.machines import limits
from tests.lib.story import BranchOnly, Every
from tests.lib.together import Client, Together

PREFIX = [token % 3 for token in range(7, 127, 2)]
OPEN = 4

shares = st.one_of(st.just(1.0), st.floats(0, 1))
words = st.lists(st.integers(0, 2), min_size=1, max_size=12)
pick = st.integers(0, 7)
anybody = precondition(lambda self: self.users.clients)
room = precondition(lambda self: len(self.users.clients) < OPEN)


WRONG = 90
"""The least of the tokens that nobody says: those of wrong drafts."""

drafted = st.lists(st.integers(0, 2), min_size=1, max_size=5)
in_round = precondition(lambda self: any(client.session.in_round for client in self.users.clients))
out_of_round = precondition(lambda self: any(not client.session.in_round for client in self.users.clients))


class Users(RuleBasedStateMachine):
    """Up to four at a time. The rules that would compute something else leave a user in a round alone."""

    family: ClassVar[str]
    steps: ClassVar[int]
    rounds: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.users = Together(self.family)
        self.said = [PREFIX]

    @initialize(
        budget=st.sampled_from([None, 500, 150, 60, 0]),
        points=st.sampled_from([BranchOnly(), Every(8), Every(4, 2)]),
        chunk=st.sampled_from([1, 5, 16, 50]),
    )
    def opens(self, budget: int | None, points: CheckpointPolicy, chunk: int) -> None:
        self.users = Together(self.family, budget=budget, policy=points, chunk=chunk)

    @room
    @rule(which=pick, share=shares, new=words, salt=st.sampled_from(["", "", "", "s"]))
    def begin(self, which: int, share: float, new: list[int], salt: str) -> None:
        type(self).steps += 1
        prompt = self._prompt(which, share, new)
        self.users.begin(prompt, salt)
        self.said = [*self.said, prompt][-6:]

    @room
    @rule(which=pick, share=shares, new=words)
    def wait_and_begin(self, which: int, share: float, new: list[int]) -> None:
        """Begins after the session that computes a part of the prompt, if there is one."""
        type(self).steps += 1
        prompt = self._prompt(which, share, new)
        for _ in range(200):
            if not self.users.follows(prompt):
                break
            for client in self.users.clients:
                client.read(chunks=1)
        else:
            raise AssertionError("no session makes progress")
        self.users.begin(prompt)

    @anybody
    @rule(who=pick, chunks=st.integers(1, 4))
    def read(self, who: int, chunks: int) -> None:
        self._talk(who).read(chunks)

    @anybody
    @rule(who=pick, answer=st.lists(st.integers(0, 2), max_size=4))
    def say(self, who: int, answer: list[int]) -> None:
        client = self._talk(who).say(*answer)
        self.said = [*self.said, [*client.session.recorded]][-6:]

    @anybody
    @rule(who=pick, ahead=st.booleans())
    def close(self, who: int, ahead: bool) -> None:
        client = self._talk(who)
        if ahead:
            client.forward_unread(1)
        client.close()

    @anybody
    @rule(
        who=pick, how=st.sampled_from([Client.fail, Client.fail_in_layers, Client.fail_in_layers, Client.fail_in_cache])
    )
    def break_off(self, who: int, how: Callable[[Client], None]) -> None:
        how(self._talk(who))

    @rule(nbytes=st.sampled_from([0, 0, 40, 10_000]))
    def reserve(self, nbytes: int) -> None:
        self.users.reserve(nbytes)

    @precondition(lambda self: not self.users.clients)
    @rule()
    def clear(self) -> None:
        self.users.reserve(0)
        self.users.cache.detach()
        self.users.check()
        assert self.users.cache.nbytes == 0

    @out_of_round
    @rule(who=pick, plan=st.lists(st.tuples(drafted, st.integers(1, 7)), min_size=1, max_size=5), stay=st.booleans())
    def draft(self, who: int, plan: list[tuple[list[int], int]], stay: bool) -> None:
        """Some rounds, the last of which may stay open."""
        client = self._talk(who)
        for right, wrong in plan:
            if client.session.in_round:
                client.accept(self._right(client))
            type(self).rounds += 1
            client.draft(*right, *range(WRONG, WRONG + wrong))
        if not stay:
            client.accept(self._right(client))

    @in_round
    @rule(who=pick, count=pick)
    def accept(self, who: int, count: int) -> None:
        client = self._drafting(who)
        client.accept(min(count, self._right(client)))
        self.said = [*self.said, [*client.session.recorded]][-6:]

    @in_round
    @rule(who=pick, known=pick)
    def leave(self, who: int, known: int) -> None:
        client = self._drafting(who)
        for token in client.drafts[: min(known, self._right(client))]:
            client.session.record(token)
        client.close()

    @anybody
    @rule(who=pick)
    def fail_in_round(self, who: int) -> None:
        client = self.users.clients[who % len(self.users.clients)]
        if client.session.in_round:
            client.fail()
        else:
            client.fail_in_round()

    @invariant()
    def nothing_wrong_is_kept(self) -> None:
        assert all(token < WRONG for node in self.users.nodes for token in node.tokens)

    def _right(self, client: Client) -> int:
        return sum(token < WRONG for token in client.drafts)

    def _drafting(self, who: int) -> Client:
        among = [client for client in self.users.clients if client.session.in_round]
        return among[who % len(among)]

    def _talk(self, who: int) -> Client:
        """A user who is in no round; one is taken out of it if all are."""
        among = [client for client in self.users.clients if not client.session.in_round]
        if not among:
            among = [self._drafting(who)]
            among[0].accept(1)
        return among[who % len(among)]

    def teardown(self) -> None:
        self.users.reserve(0)
        while self.users.clients:
            self.users.clients[0].close()

    def _prompt(self, which: int, share: float, new: list[int]) -> list[int]:
        said = self.said[which % len(self.said)]
        return [*said[: int(len(said) * share)], *new][-120:]


def run(family: str, examples: int, steps: int, derandomize: bool, shrink: bool = True) -> int:
    """Runs machines; returns how many sessions and rounds they began, whichever is less."""
    machine = type("Machine", (Users,), {"family": family, "steps": 0, "rounds": 0})
    stories = limits(examples, steps, derandomize=derandomize, shrink=shrink)
    run_state_machine_as_test(machine, settings=stories)
    return min(machine.steps, machine.rounds)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_users_at_the_same_time_leave_each_other_alone(family: str) -> None:
    assert run(family, examples=30, steps=30, derandomize=True) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_users_at_the_same_time_leave_each_other_alone(family: str) -> None:
    assert run(family, examples=600, steps=60, derandomize=False) >= 3000
