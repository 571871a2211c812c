"""Who begins when, who steps when, and what it costs the others that someone leaves.

Times are made up: a forward takes 10 ms and 1 ms for each token, of however many rows, and nothing else takes any.
"""

import pytest

from runner.engine.events import Started, Text
from runner.engine.policy import Decode, Prefill, Slice, SlicePolicy, View
from scripts.tools.models.tiny import KINDS, words
from tests.lib.company import BATCHABLE, BY_TURNS, Asked, Company

PHASES = ("waiting", "behind", "prefilling", "alone", "batch")


def prompts(count: int, length: int = 30) -> list[list[int]]:
    return [words(length, 2 * number + 1) for number in range(count)]


def test_requests_begin_in_the_order_of_their_arrival_and_are_told_so_only_then() -> None:
    users = Company("llama", parallel=2)
    asked = [users.ask(prompt, 3 + 5 * (number % 3)) for number, prompt in enumerate(prompts(7))]
    begun: list[int] = []
    while not users.running.idle:
        users.advance()
        assert users.taken() <= 2
        waiting = [number for number, each in enumerate(asked) if users.phase(each) == "waiting"]
        assert [number for number, each in enumerate(asked) if not each.started] == waiting
        begun += [number for number in range(7) if asked[number].started and number not in begun]
    assert begun == list(range(7))
    users.check()


@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_as_many_run_at_once_as_there_are_places(parallel: int) -> None:
    users = Company("llama", parallel=parallel)
    for prompt in prompts(9):
        users.ask(prompt, 30)
    most = 0
    while not users.running.idle:
        users.advance()
        most = max(most, users.trie.describe().sessions)
    assert most == parallel
    users.check()


@pytest.mark.parametrize("cache", ["single", "none"])
def test_caches_of_one_session_run_one_request_at_a_time(cache: str) -> None:
    users = Company("llama", cache=cache)
    asked = [users.ask(prompt, 5) for prompt in prompts(3)]
    while not users.running.idle:
        users.advance()
        assert sum(each.started and each.finished is None for each in asked) <= 1
    users.check()
    assert users.forward.most_rows == 1


# --- leaving


def brought_to(phase: str) -> tuple[Company, Asked, list[Asked]]:
    """Three requests that run, and one more that is where it is wanted."""
    users = Company("llama", SlicePolicy(16, 0.1), parallel=3 if phase == "waiting" else 8)
    others = [users.ask(prompt, 60) for prompt in prompts(1 if phase == "alone" else 3, 40)]
    if phase == "alone":  # the one that is there cannot be joined: it reads a prompt of its own
        others.append(users.ask(words(600, 8), 2))
        one = others.pop(0)
        users.until(lambda: len(one.tokens) > 5)
        return users, one, others
    if phase != "behind":
        users.until(lambda: all(len(each.tokens) > 2 for each in others))
        one = users.ask(words(200, 50), 30)
    else:
        others.append(users.ask(words(300, 50), 2))
        one = users.ask([*words(250, 50), 1], 30)
    users.until(lambda: users.phase(one) == phase)
    if phase in ("prefilling", "batch"):
        users.advance(6)
    assert users.phase(one) == phase
    return users, one, others


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancel_costs_one_slice_at_most(phase: str) -> None:
    users, one, others = brought_to(phase)
    calls, tokens, told = len(users.forward.calls), list(one.tokens), len(one.told)
    one.request.cancel()
    users.advance()
    assert users.phase(one) == "gone"
    assert len(users.forward.calls) <= calls + 1
    assert (one.tokens, len(one.told)) == (tokens, told)
    assert one.session is None or one.session not in users.trie._sequences.sessions
    users.finish()
    users.check()
    assert all(each.finished for each in others)


def test_a_request_that_is_cancelled_in_the_queue_is_never_begun() -> None:
    users, one, _ = brought_to("waiting")
    one.request.cancel()
    users.finish()
    assert not one.told
    assert one.session is None


@pytest.mark.parametrize(
    ("name", "phase"),
    [(name, phase) for name in KINDS for phase in ("prefilling", "batch" if name in BATCHABLE else "alone")],
)
def test_what_was_computed_is_kept_for_the_retry(name: str, phase: str) -> None:
    users = Company(name, SlicePolicy(16, 0.1))
    one = users.ask(words(70), 40)
    for prompt in prompts(2) if phase == "batch" else ():
        users.ask(prompt, 35)
    users.until(lambda: users.phase(one) == phase)
    users.advance(3 if phase == "prefilling" else 12)
    assert one.session is not None
    said = one.tokens
    seen = one.session.position if phase == "prefilling" else 70 + len(said)
    one.request.cancel()
    users.advance()
    again = users.ask([*words(70), *said, 1, 2], 3)
    users.finish()
    users.check()
    assert 0 < seen <= again.cached + 1
    assert again.cached <= seen


class Reluctant(SlicePolicy):
    """Nothing begins while someone decodes, until it is told so."""

    willing = False

    def next(self, view: View) -> Slice | None:
        return super().next(view if self.willing else view._replace(startable=0) if view.decoding else view)


def test_a_request_that_leaves_when_its_turn_has_come_is_never_begun() -> None:
    schedule = Reluctant(64, 0.1)
    users = Company("llama", schedule)
    users.ask(words(30), 60)
    users.until(lambda: len(users.everyone[0].tokens) > 2)
    late, later = users.ask(words(30, 2), 5), users.ask(words(30, 3), 5)
    users.advance(2)
    schedule.willing = True
    late.request.cancel()
    users.until(lambda: later.started)
    assert not late.told
    users.finish()
    users.check()


@pytest.mark.parametrize("phase", ["prefilling", "batch"])
def test_the_place_of_one_who_leaves_is_taken_at_once(phase: str) -> None:
    users = Company("llama", SlicePolicy(16, 0.1), parallel=2)
    users.ask(words(30), 200)
    users.until(lambda: len(users.everyone[0].tokens) > 2)
    leaves = users.ask(words(900 if phase == "prefilling" else 40, 2), 100)
    waits = users.ask(words(30, 3), 5)
    users.until(lambda: users.phase(leaves) == phase)
    users.advance(5)
    users.until(lambda: users.forward.calls[-1][1] == 1)  # a step came last
    assert not waits.started
    leaves.request.cancel()
    users.advance(2)
    assert waits.started
    users.finish()
    users.check()


# --- turns and gaps


@pytest.mark.parametrize("name", BY_TURNS)
def test_answers_that_cannot_be_computed_together_take_turns(name: str) -> None:
    users = Company(name)
    asked = [users.ask(prompt, 25) for prompt in prompts(4)]
    users.until(lambda: all(each.tokens for each in asked))
    ahead = [len(each.tokens) for each in asked]
    while all(each.finished is None for each in asked):
        users.advance()
        steps = [len(each.tokens) - before for each, before in zip(asked, ahead, strict=True)]
        assert max(steps) - min(steps) <= 1
    users.finish()
    users.check()
    assert users.forward.most_rows == 1


def gaps(users: Company, stream: Asked, until: Asked) -> list[float]:
    """Seconds between one token of a stream and the next, while something else is computed."""
    found: list[float] = []
    count, at = len(stream.told), users.clock.now
    while until.finished is None and stream.finished is None:
        users.advance()
        if len(stream.told) > count:
            found.append(users.clock.now - at)
            count, at = len(stream.told), users.clock.now
    return found


@pytest.mark.parametrize("gap_s", [0.05, 0.1, 0.3])
def test_a_stream_goes_on_while_a_prompt_is_read(gap_s: float) -> None:
    users = Company("llama", SlicePolicy(128, gap_s))
    stream = users.ask(words(10), 500)
    users.until(lambda: len(stream.tokens) > 5)
    long = users.ask(words(500, 3), 1)
    found = gaps(users, stream, long)
    assert long.finished
    assert len(found) > 1
    assert max(found) <= gap_s + 0.02  # a first slice, while nobody knows what a token costs
    stream.request.cancel()
    users.finish()
    users.check()


class Noted(SlicePolicy):
    """What the schedule is told: the tokens of every slice of a prompt, 0 for anything else, and how long it took; and
    the group that made the last step."""

    def __init__(self) -> None:
        super().__init__(64, 0.1)
        self.told: list[tuple[int, float]] = []
        self.stepped = -1

    def took(self, slice: Slice, view: View, seconds: float) -> None:  # noqa: A002 - it is the field's word
        if isinstance(slice, Decode):
            self.stepped = view.decoding[slice.index]
        self.told.append((slice.tokens if isinstance(slice, Prefill) else 0, round(seconds, 6)))
        super().took(slice, view, seconds)


def test_the_schedule_is_told_what_was_really_computed_and_how_long_it_took() -> None:
    notes = Noted()
    users = Company("qwen3_next", notes)
    users.ask(words(200), 1)
    users.ask([*words(110), *words(20, 5)], 1)  # the first one stops where they part, for this one
    users.finish()
    users.check()
    assert users.everyone[1].cached == 110
    slices = [told for told in notes.told if told[0]]
    assert slices == [(length, round(0.01 + 0.001 * length, 6)) for _, length in users.forward.calls if length > 1]
    assert (46, 0.056) in slices
    assert sum(seconds for _, seconds in notes.told) == pytest.approx(users.clock.now)


def test_the_schedule_is_told_that_the_group_stepped_which_another_one_joined() -> None:
    notes = Noted()
    users = Company("llama", notes)
    asked = [users.ask(prompt, 30) for prompt in prompts(3)]
    sizes = []
    while all(each.finished is None for each in asked):
        groups = {group.id: len(group.generations) for group in users.running._groups}
        users.advance()
        after = {group.id: len(group.generations) for group in users.running._groups}
        if len(after) < len(groups):
            assert after[notes.stepped] > groups[notes.stepped]
            sizes.append(after[notes.stepped])
    assert sizes[:2] == [2, 3]
    users.finish()
    users.check()


def test_where_nobody_decodes_prompts_are_read_in_whole_chunks() -> None:
    users = Company("llama", SlicePolicy(128, 0.1))
    users.ask(words(400), 1)
    users.finish()
    assert users.forward.calls == [(1, 128)] * 3 + [(1, 15), (1, 1)]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    users = Company("llama", SlicePolicy(64, 0.1))
    long = users.ask(words(1500), 5)
    users.advance(3)
    short = users.ask(words(30, 2), 5)
    users.until(lambda: short.finished is not None)
    assert long.session is not None
    assert long.session.position < 500
    users.finish()
    users.check()


def test_two_long_prompts_and_a_stream_all_get_on() -> None:
    users = Company("llama", SlicePolicy(64, 0.1))
    stream = users.ask(words(10), 400)
    users.until(lambda: len(stream.tokens) > 5)
    one, other = users.ask(words(700, 3), 3), users.ask(words(700, 5), 3)
    found = gaps(users, stream, one)
    assert max(found) <= 0.13
    users.until(lambda: other.finished is not None)
    assert stream.finished is None
    stream.request.cancel()
    users.finish()
    users.check()


def test_what_is_told_arrives_in_the_slice_in_which_it_is_known() -> None:
    users = Company("llama")
    asked = [users.ask(prompt, 10, metered=True) for prompt in prompts(3)]
    while not users.running.idle:
        before = [len(each.told) for each in asked]
        users.advance()
        assert not users._outbox._pending
        grown = [len(each.told) - count for each, count in zip(asked, before, strict=True)]
        assert max(grown) <= 2  # a token, or the last one with the end
    for each in asked:
        counted = [event.metrics.eval_count for event in each.told if isinstance(event, Text) and event.metrics]
        assert counted == list(range(1, 11))
        assert isinstance(each.told[0], Started)
    users.check()
