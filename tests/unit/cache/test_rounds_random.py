"""Whatever several users do at the same time, some of them in rounds: `Together` checks all of it after every step.

The users of `test_trie_together_random.py`, whose answers may also come in rounds. Others go on while a round is open,
and whoever is in one may leave or fail. Wrong drafts are tokens that nobody says, so that any in the trie are noticed.

`test_the_machine_notices_a_draft` shows that one draft which stays does not pass.
"""

from typing import ClassVar
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from runner.cache.layer_interface import LayerState, Mark
from tests.lib.fakes import FAMILIES, FakeKVState, FakeRecurrentState, FakeWindowState
from tests.lib.machines import limits
from tests.lib.together import Client
from tests.unit.cache.test_trie_together_random import Users, anybody, pick

WRONG = 90

drafted = st.lists(st.integers(0, 2), min_size=1, max_size=5)
in_round = precondition(lambda self: any(client.session.in_round for client in self.users.clients))
out_of_round = precondition(lambda self: any(not client.session.in_round for client in self.users.clients))


class Drafters(Users):
    """A user in a round is left alone by the rules that would compute something else."""

    rounds: ClassVar[int]

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


def run(family: str, examples: int, steps: int, derandomize: bool, shrink: bool = True) -> int:
    """Runs machines; returns how many rounds they began."""
    machine = type("Machine", (Drafters,), {"family": family, "steps": 0, "rounds": 0})
    stories = limits(examples, steps, derandomize=derandomize, shrink=shrink)
    run_state_machine_as_test(machine, settings=stories)
    return machine.rounds  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_users_in_rounds_leave_each_other_alone(family: str) -> None:
    assert run(family, examples=40, steps=30, derandomize=True) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_users_in_rounds_leave_each_other_alone(family: str) -> None:
    assert run(family, examples=600, steps=60, derandomize=False) >= 3000


@pytest.mark.parametrize(("family", "state"), [("K", FakeKVState), ("S", FakeWindowState), ("P", FakeRecurrentState)])
def test_the_machine_notices_a_draft(family: str, state: type[LayerState]) -> None:
    """Layers that say they are back, and have every token of the round still in them."""
    revert = state.revert

    def forget(self: LayerState, mark: Mark, to: int) -> None:
        layer = vars(self)["layer"]
        before = dict(vars(layer))
        revert(self, mark, to)
        vars(layer).update(before)

    with patch.object(state, "revert", forget), pytest.raises(AssertionError):
        run(family, examples=40, steps=30, derandomize=True, shrink=False)
