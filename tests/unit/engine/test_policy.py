"""The choice of the next slice, over simulated time: costs are made up, and thousands of slices take milliseconds."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.engine.policy import Begin, Decode, Encode, Prefill, Slice, SlicePolicy, StepLimit, Workload
from runner.settings import LEAST_SLICE_TOKENS

CHUNK, GAP_S = 512, 0.1


@dataclass(frozen=True)
class Costs:
    """The costs of slices, in seconds."""

    step_s: float = 0.01
    row_s: float = 0.0  # and for every row of the batch
    token_s: float = 0.001
    forward_s: float = 0.0  # and for every forward over a part of a prompt
    begin_s: float = 0.0
    encode_s: float = 0.03
    noise: Callable[[], float] = lambda: 1.0

    def step(self, rows: int) -> float:
        return (self.step_s + rows * self.row_s) * self.noise()

    def prefill(self, tokens: int) -> float:
        return (self.forward_s + tokens * self.token_s) * self.noise()


@dataclass(eq=False)
class Request:
    """`points` are the positions at which a forward over its prompt always ends; `pieces` are those of a picture before
    it. A prompt of 0 tokens is cached."""

    prompt: int
    answer: int
    at_s: float = 0.0
    points: frozenset[int] = frozenset()
    pieces: int = 0
    done: int = 0
    tokens_s: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.prompt - self.done

    @property
    def ended(self) -> bool:
        return len(self.tokens_s) == self.answer

    @property
    def gap_s(self) -> float:
        return max((b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)), default=0.0)


class Ran(NamedTuple):
    slice: Slice
    work: Workload
    seconds: float
    requests: tuple[Request, ...]
    """The requests that it advanced."""


class Simulation:
    """Runs requests as the engine does: each in a batch of its own or, after its first step, all in one batch."""

    def __init__(
        self, policy: SlicePolicy, costs: Costs, requests: list[Request], places: int = 64, batch: bool = False
    ) -> None:
        self.policy, self.costs, self.places, self.batch = policy, costs, places, batch
        self.requests = sorted(requests, key=lambda request: request.at_s)
        self.coming = list(self.requests)
        self.encoding: list[Request] = []
        self.prefilling: list[Request] = []
        self.batches: dict[int, list[Request]] = {}
        self.ids = iter(range(1 << 30))
        self.batch_id: int | None = None
        self.now_s = 0.0
        self.ran: list[Ran] = []

    def work(self) -> Workload:
        free = self.places - len(self.encoding) - len(self.prefilling) - sum(map(len, self.batches.values()))
        waiting = sum(request.at_s <= self.now_s for request in self.coming)
        lefts = [request.left for request in self.prefilling]
        return Workload(min(free, waiting), lefts, list(self.batches), len(self.encoding))

    def run(self, *until: Request) -> "Simulation":
        """Runs slices until these requests, or all, have ended."""
        while not all(request.ended for request in until or self.requests):
            assert len(self.ran) < 100_000, "a request is never computed"
            self.one()
        return self

    def one(self) -> None:
        if not (self.encoding or self.prefilling or self.batches):
            self.now_s = max(self.now_s, self.coming[0].at_s)
        work = self.work()
        slice_ = self.policy.next(work)
        assert slice_ is not None
        assert self.policy.next(work) == slice_, "`next` changes nothing"
        match slice_:
            case Begin():
                assert work.startable
                requests: tuple[Request, ...] = (self.coming.pop(0),)
                self.go_on(*requests)
                seconds = self.costs.begin_s * self.costs.noise()
            case Encode():
                requests = (self.encoding.pop(0),)
                requests[0].pieces -= 1
                self.go_on(*requests)
                seconds = self.costs.encode_s * self.costs.noise()
            case Prefill(index, tokens):
                requests, slice_, seconds = self.prefill(self.prefilling[index], slice_, tokens)
            case Decode(index):
                requests, seconds = self.decode(work.decoding[index])
        self.now_s += seconds if not isinstance(slice_, Decode) else 0.0
        self.policy.took(slice_, work, seconds)
        self.ran.append(Ran(slice_, work, seconds, requests))

    def go_on(self, request: Request) -> None:
        """Moves a request to where its next slice is computed."""
        if request.pieces:
            self.encoding.insert(0, request)
        elif request.left:
            self.prefilling.append(request)
        else:
            self.batches[next(self.ids)] = [request]

    def prefill(self, request: Request, asked: Prefill, tokens: int) -> tuple[tuple[Request, ...], Slice, float]:
        assert 0 < tokens <= request.left
        count = min([tokens, *(point - request.done for point in request.points if point > request.done)])
        seconds = self.costs.prefill(count)
        request.done += count
        if not request.left:
            self.prefilling.remove(request)
            self.go_on(request)
        return (request,), asked._replace(tokens=count), seconds

    def decode(self, number: int) -> tuple[tuple[Request, ...], float]:
        rows = self.batches[number]
        seconds = self.costs.step(len(rows))
        self.now_s += seconds
        for request in rows:
            request.tokens_s.append(self.now_s)
        self.batches[number] = left = [request for request in rows if not request.ended]
        if not left:
            del self.batches[number]
        elif self.batch and self.batch_id not in self.batches:
            self.batch_id = number
        elif self.batch and number != self.batch_id and self.batch_id is not None:
            self.batches[self.batch_id] += self.batches.pop(number)
        return tuple(rows), seconds

    def seconds(self, kind: type[Slice], *of: Request) -> float:
        return sum(
            ran.seconds for ran in self.ran if isinstance(ran.slice, kind) and (not of or set(of) & set(ran.requests))
        )

    def prefills(self, *of: Request) -> list[int]:
        """Returns the tokens of each slice of a prompt."""
        return [
            ran.slice.tokens
            for ran in self.ran
            if isinstance(ran.slice, Prefill) and (not of or set(of) & set(ran.requests))
        ]


def learned(costs: Costs, chunk_tokens: int = CHUNK, max_gap_s: float = GAP_S) -> SlicePolicy:
    """Returns a policy that knows the costs of a begin and of a token."""
    policy = SlicePolicy(chunk_tokens, max_gap_s)
    for _ in range(40):
        policy.took(Begin(), Workload(1), costs.begin_s)
    policy.took(Prefill(0, chunk_tokens), Workload(0, [chunk_tokens]), costs.prefill(chunk_tokens))
    return policy


def step(policy: SlicePolicy, *batches: int, seconds: float = 0.01, work: Workload | None = None) -> None:
    """Lets each of these batches step once."""
    work = work or Workload(decoding=batches)
    for number in batches:
        policy.took(Decode(list(work.decoding).index(number)), work, seconds)


def test_without_requests_there_is_no_slice() -> None:
    assert SlicePolicy(CHUNK, GAP_S).next(Workload()) is None


@given(
    costs=st.builds(
        Costs, token_s=st.floats(0, 1), begin_s=st.floats(0, 9), step_s=st.floats(0, 9), forward_s=st.floats(0, 1)
    ),
    earlier=st.lists(st.integers(1, 2000), max_size=3),
)
def test_a_lone_request_computes_the_same_forwards_whatever_the_clock_says(costs: Costs, earlier: list[int]) -> None:
    lone = Request(1300, 5)
    policy = SlicePolicy(CHUNK, GAP_S)
    for prompt in earlier:
        Simulation(policy, costs, [Request(prompt, 2)]).run()
    assert Simulation(policy, costs, [lone]).run().prefills() == [512, 512, 276]


def test_a_request_that_can_begin_begins_at_once() -> None:
    policy = SlicePolicy(CHUNK, GAP_S)
    assert policy.next(Workload(1)) == Begin()
    assert policy.next(Workload(1, [4096])) == Begin()
    step(policy, 7)
    assert policy.next(Workload(1, [4096], [7])) == Begin()


def test_a_request_does_not_begin_where_a_stream_would_wait_beyond_its_gap() -> None:
    policy = learned(Costs(begin_s=0.03))
    step(policy, 7)
    work = Workload(1, [4096], [7])
    policy.took(Prefill(0, 55), work, 0.055)  # 0.1 - 0.01 - 0.055 are left
    assert policy.next(work) == Begin()
    policy.took(Prefill(0, 6), work, 0.006)
    assert policy.next(work) == Decode(0)


def test_what_never_fits_follows_a_round_of_steps() -> None:
    policy = learned(Costs(begin_s=0.5))
    step(policy, 1, 2, seconds=0.06)
    work = Workload(3, [], [1, 2])
    taken = []
    for _ in range(7):
        slice_ = policy.next(work)
        assert slice_ is not None
        taken.append(slice_)
        policy.took(slice_, work, 0.5 if slice_ == Begin() else 0.06)
    assert taken == [Begin(), Decode(0), Decode(1)] * 2 + [Begin()]


def test_the_batch_that_has_waited_longest_steps() -> None:
    policy = SlicePolicy(CHUNK, GAP_S)
    step(policy, 3, 1, 2)
    assert policy.next(Workload(decoding=[1, 2, 3])) == Decode(2)
    assert policy.next(Workload(decoding=[1, 2])) == Decode(0)


def test_a_prompt_gets_what_the_gap_leaves() -> None:
    policy = learned(Costs())
    work = Workload(0, [4096], [1])
    step(policy, 1, work=work)
    assert policy.next(work) == Prefill(0, 88)  # 0.1 - 0.01, in eights
    policy.took(Prefill(0, 32), work, 0.032)  # a checkpoint ended it
    assert policy.next(work) == Prefill(0, 56)
    policy.took(Prefill(0, 56), work, 0.056)
    assert policy.next(work) == Decode(0)


def test_every_batch_must_step_within_the_gap_in_its_turn() -> None:
    policy = learned(Costs())
    work = Workload(0, [4096], [1, 2, 3])
    step(policy, 1, 2, 3, seconds=0.01, work=work)
    # Batch 1 has waited for 0.02 and steps first, batch 3 has not and steps third: each has 0.07.
    assert policy.next(work) == Prefill(0, 64)
    step(policy, 1, seconds=0.03, work=work)  # which counts at once
    # Batch 2 has waited for 0.04; all three steps take 0.04 after it.
    assert policy.next(work) == Prefill(0, 48)


def test_answers_whose_first_tokens_are_known_do_not_wait_for_steps() -> None:
    """For half of the gap at most."""
    policy = learned(Costs())
    step(policy, 1, seconds=GAP_S)
    work = Workload(prefilling=[1, 1, 1], decoding=[1])
    for _ in range(3):
        known = policy.next(work)
        assert known == Prefill(0, 1)
        policy.took(Prefill(0, 0), work, 0.2 * GAP_S)
    assert policy.next(work) == Decode(0)
    policy.took(Decode(0), work, GAP_S)
    assert policy.next(work) == Prefill(0, 1)
    policy.took(Prefill(0, 1), work, 0.2 * GAP_S)
    assert policy.next(work) == Decode(0)


def test_the_last_part_of_a_prompt_is_given_whole() -> None:
    policy = learned(Costs())
    work = Workload(0, [5], [1])
    step(policy, 1, work=work)
    policy.took(Prefill(0, 84), work, 0.084)
    assert policy.next(work) == Prefill(0, 5)
    assert policy.next(Workload(0, [6], [1])) == Prefill(0, 6)
    assert policy.next(Workload(0, [7], [1])) == Decode(0)


@pytest.mark.parametrize(
    ("work", "limit"),
    [
        (Workload(decoding=[1]), StepLimit(GAP_S, 16, ahead=False)),
        (Workload(decoding=[1, 2, 3, 4]), StepLimit(GAP_S / 4, 4, ahead=False)),
        (Workload(prefilling=[7], decoding=[1]), StepLimit(GAP_S / 2, 0, ahead=False)),
        (Workload(startable=1, decoding=[1]), StepLimit(GAP_S / 2, 0, ahead=False)),
        (Workload(encoding=1, decoding=[1, 2, 3]), StepLimit(GAP_S / 4, 0, ahead=False)),
    ],
)
def test_rounds_of_drafts_share_the_gap_with_all_that_waits(work: Workload, limit: StepLimit) -> None:
    assert SlicePolicy(CHUNK, GAP_S).step_limit(work, 0) == limit


def test_a_round_takes_what_a_slice_before_it_has_left_of_the_gap() -> None:
    policy, work = learned(Costs()), Workload(prefilling=[500], decoding=[1])
    step(policy, 1, work=work)
    assert policy.step_limit(work, 0).seconds == pytest.approx(GAP_S / 2)
    policy.took(Prefill(0, 84), work, 0.8 * GAP_S)
    assert policy.step_limit(work, 0).seconds == pytest.approx(0.2 * GAP_S)
    assert policy.step_limit(Workload(decoding=[1]), 0).seconds == GAP_S, "nobody waits for more"
    step(policy, 1, work=work)
    assert policy.step_limit(work, 0).seconds == pytest.approx(GAP_S / 2)


def test_a_step_has_a_second_forward_if_both_fit_into_what_is_left_of_the_gap() -> None:
    policy, alone, both = SlicePolicy(CHUNK, GAP_S), Workload(decoding=[1]), Workload(decoding=[1, 2])
    reading = Workload(prefilling=[500], decoding=[1])
    policy.took(Decode(0), alone, 0.3 * GAP_S)
    assert policy.step_limit(alone, 0).ahead, "nothing else is to be done"
    assert not policy.step_limit(reading, 0).ahead, "two steps take more than half of the gap"
    policy.took(Prefill(0, 84), reading, 0.3 * GAP_S)
    assert policy.step_limit(alone, 0).ahead
    policy.took(Prefill(0, 84), reading, 0.2 * GAP_S)
    assert not policy.step_limit(alone, 0).ahead, "two steps take more than is left"
    policy.took(Decode(1), both, 0.1 * GAP_S)
    assert not policy.step_limit(both, 1).ahead, "this answer may join the one that has waited"
    for _ in range(8):
        policy.took(Decode(0), alone, 0.1 * GAP_S)
    assert policy.step_limit(reading, 0).ahead


def test_slices_leave_room_for_the_longest_of_the_last_rounds() -> None:
    policy, work = learned(Costs()), Workload(prefilling=[500], decoding=[1])
    for seconds in (0.01, 0.04):
        policy.took(Decode(0), work, seconds)
    assert policy.next(work) == Prefill(0, 56), "not 75, as the mean of both would have it"
    policy.took(Decode(0, computed=False), work, 0.001)
    assert policy.next(work) == Prefill(0, 56), "a step that only reads a token is no measure"
    policy.took(Decode(0), work, 0.02)
    assert policy.next(work) == Prefill(0, 64)


def test_a_first_step_waits_for_whole_prompts_within_the_gap_if_their_answers_can_join() -> None:
    policy = learned(Costs())
    assert policy.next(Workload(0, [40], [1])) == Decode(0)
    assert policy.next(Workload(0, [4096], [1], joining=[1])) == Decode(0)
    work = Workload(0, [40, 50], [1], joining=[1])
    assert policy.next(work) == Prefill(0, 40)
    policy.took(Prefill(0, 40), work, 0.04)
    work = Workload(0, [50], [1, 2], joining=[1, 2])
    assert policy.next(work) == Prefill(0, 50)
    assert policy.next(work._replace(prefilling=[61])) == Decode(0)
    assert policy.next(work._replace(decoding=[1, 2, 3], joining=[1, 2])) == Prefill(0, 50)


def test_slices_begin_small_and_double_while_the_cost_of_a_token_is_unknown() -> None:
    costs = Costs(token_s=1e-9, step_s=0.001)
    stream, long = Request(1, 10_000), Request(4096, 1, at_s=0.01)
    policy = SlicePolicy(CHUNK, GAP_S)
    step(policy, 0, seconds=0.001)
    work = Workload(0, [4096], [0])
    sizes = []
    for _ in range(6):
        slice_ = policy.next(work)
        assert isinstance(slice_, Prefill)
        sizes.append(slice_.tokens)
        policy.took(slice_, work, slice_.tokens * 1e-9)
    assert sizes == [32, 64, 128, 256, 512, 512]
    running = Simulation(SlicePolicy(CHUNK, GAP_S), costs, [stream, long])
    running.run(long)
    assert running.prefills(long)[:4] == [32, 64, 128, 256]


@pytest.mark.parametrize("slow", ["prefill", "step", "begin"])
def test_a_first_measurement_of_minutes_is_forgotten(slow: str) -> None:
    """A slice that compiles or reads cold pages stops no other work, and its time soon counts no more."""
    policy = SlicePolicy(CHUNK, GAP_S)
    work = Workload(0, [100_000], [1])
    policy.took(Prefill(0, 32), work, 200.0 if slow == "prefill" else 0.032)
    policy.took(Begin(), Workload(1, [], [1]), 200.0 if slow == "begin" else 0.0)
    step(policy, 1, seconds=200.0 if slow == "step" else 0.01)
    sizes = []
    for _ in range(120):
        slice_ = policy.next(work)
        if isinstance(slice_, Prefill):
            sizes.append(slice_.tokens)
            policy.took(slice_, work, slice_.tokens * 0.001)
        else:
            assert slice_ == Decode(0)
            step(policy, 1)
    assert min(sizes) == LEAST_SLICE_TOKENS or slow == "begin"
    assert sizes[-20:] == [88 if slow == "begin" else sizes[-1]] * 20
    assert sizes[-1] >= 80
    assert sizes[0] <= 64
    begun = Workload(1, [], [1])
    for _ in range(60):
        slice_ = policy.next(begun)
        assert slice_ in (Begin(), Decode(0))
        policy.took(slice_, begun, 0.01)
    step(policy, 1)
    begun = Workload(1, [100_000], [1])
    policy.took(Prefill(0, 72), begun, 0.072)
    assert policy.next(begun) == Begin(), "0.01 of 0.018"


def test_a_cost_that_rises_counts_at_once_and_one_that_falls_by_half() -> None:
    policy = learned(Costs())
    work = Workload(0, [4096], [1])
    for cost_s, tokens in ((0.002, 40), (0.001, 56)):  # 0.09 of 0.002, and of 0.0015
        policy.took(Prefill(0, 80), work, 80 * cost_s)
        step(policy, 1, work=work)
        assert policy.next(work) == Prefill(0, tokens)


def test_a_short_prompt_gets_through_behind_a_long_one() -> None:
    long, short = Request(50_000, 1), Request(700, 1, at_s=5.0)
    simulation = Simulation(SlicePolicy(CHUNK, GAP_S), Costs(), [long, short]).run()
    assert short.tokens_s[0] - short.at_s <= 2 * 0.512 + 0.7 + 0.02
    assert simulation.prefills(short) == [512, 188]


def test_the_oldest_prompt_keeps_half_of_the_time() -> None:
    """Many short prompts arrive, and some of them end before their slice does."""
    long, short = Request(15_000, 1), [Request(60 + 7 * (n % 5), 1, at_s=0.05 * n) for n in range(2500)]
    costs = Costs()
    running = Simulation(learned(costs), costs, [Request(1, 1 << 20), long, *short], 16)
    running.run(long)
    spent = running.seconds(Prefill, long)
    assert spent >= 0.49 * running.seconds(Prefill)
    assert spent <= 0.55 * running.seconds(Prefill)


@pytest.fixture
def policy() -> SlicePolicy:
    return SlicePolicy(CHUNK, GAP_S)


def take(
    policy: SlicePolicy, work: Workload, *, step_s: float = 0.01, encode_s: float = 0.03, prefill_s: float = 0.02
) -> Slice:
    """Computes the next slice."""
    chosen = policy.next(work)
    assert chosen is not None
    assert chosen == policy.next(work), "`next` changes nothing"
    policy.took(chosen, work, {Decode: step_s, Encode: encode_s, Prefill: prefill_s}.get(type(chosen), 0.0))
    return chosen


def kinds(policy: SlicePolicy, work: Workload, count: int, **costs: float) -> list[type[Slice]]:
    return [type(take(policy, work, **costs)) for _ in range(count)]


def test_a_new_request_begins_before_a_picture_is_encoded(policy: SlicePolicy) -> None:
    assert policy.next(Workload(startable=1, encoding=1)) == Begin()


def test_pictures_and_prompts_take_turns(policy: SlicePolicy) -> None:
    assert kinds(policy, Workload(encoding=1, prefilling=[900]), 6) == [Encode, Prefill] * 3
    assert kinds(policy, Workload(encoding=3, prefilling=[900, 90]), 4) == [Encode, Prefill] * 2


def test_a_prompt_that_comes_to_a_picture_leaves_the_turn_to_others(policy: SlicePolicy) -> None:
    assert kinds(policy, Workload(encoding=1), 2) == [Encode] * 2
    assert kinds(policy, Workload(prefilling=[90], encoding=1), 2) == [Prefill, Encode]
    assert kinds(policy, Workload(prefilling=[90]), 2) == [Prefill] * 2


@pytest.mark.parametrize("encode_s", [0.03, 0.2, 5.0])
def test_between_two_steps_of_an_answer_is_at_most_one_piece_beyond_the_gap(
    policy: SlicePolicy, encode_s: float
) -> None:
    work, since_s, gaps = Workload(encoding=1, decoding=[4]), 0.0, []
    for _ in range(200):
        chosen = take(policy, work, encode_s=encode_s)
        since_s += encode_s if isinstance(chosen, Encode) else 0.01
        if isinstance(chosen, Decode):
            gaps.append(since_s)
            since_s = 0.0
    assert max(gaps[2:]) <= max(GAP_S, encode_s + 0.01) + 1e-9
    assert len(gaps) < 190  # and the picture advances


def test_beside_an_answer_prompts_and_pictures_take_turns_too(policy: SlicePolicy) -> None:
    found = kinds(policy, Workload(encoding=1, prefilling=[9000], decoding=[4]), 90)
    others = [kind for kind in found if kind is not Decode]
    assert others == [[Encode, Prefill][at % 2] for at in range(len(others))]
    assert len(others) >= 20


def test_prompts_get_as_much_time_as_beginnings_and_the_first_steps_that_follow(policy: SlicePolicy) -> None:
    policy.took(Prefill(0, 50), Workload(0, [900]), 0.05)
    for batch in range(3):
        assert policy.next(Workload(1, [900])) == Begin()
        policy.took(Begin(), Workload(1, [900]), 0.002)
        step(policy, batch, seconds=0.015, work=Workload(1, [900], [batch]))
    assert policy.next(Workload(1, [900])) == Prefill(0, CHUNK), "0.051 of 0.05"


newcomer = st.builds(
    Request,
    prompt=st.sampled_from([0, 1, 40, 900]),
    answer=st.integers(1, 3),
    pieces=st.sampled_from([0, 0, 0, 1, 4]),
)


def longest_waits(ran: list[Ran]) -> dict[object, int]:
    """Returns the most slices for which each kind of slice was possible and others were computed. Each batch is a
    kind."""
    waited: dict[object, int] = {}
    longest: dict[object, int] = {}
    for one in ran:
        work, chosen = one.work, one.slice
        possible: dict[object, object] = {Begin: work.startable, Prefill: work.prefilling, Encode: work.encoding}
        possible |= dict.fromkeys(work.decoding, True)
        done = work.decoding[chosen.index] if isinstance(chosen, Decode) else type(chosen)
        waited = {kind: waited.get(kind, 0) + 1 for kind in possible if possible[kind] and kind != done}
        longest |= {kind: max(count, longest.get(kind, 0)) for kind, count in waited.items()}
    return longest


@settings(max_examples=30, deadline=None)
@given(
    first=st.lists(newcomer, min_size=1, max_size=3),
    repeated=st.lists(newcomer, min_size=1, max_size=3),
    places=st.integers(2, 6),
    costs=st.builds(
        Costs,
        step_s=st.floats(0.01, 0.1),
        begin_s=st.floats(0.01, 0.1),
        encode_s=st.floats(0.01, 0.1),
        forward_s=st.floats(0.01, 0.1),
        token_s=st.floats(0.0, 0.0001),
    ),
    batch=st.booleans(),
    max_gap_s=st.sampled_from([0.001, 0.1, 1.0]),
)
@example([Request(60, 1)], [Request(0, 1)], 4, Costs(begin_s=0.01, token_s=0.0001, forward_s=0.01), True, GAP_S)
@example([Request(0, 1, pieces=4)], [Request(0, 1)], 4, Costs(begin_s=0.01), True, GAP_S)
@example([Request(0, 2)], [Request(0, 1)], 2, Costs(step_s=0.016, begin_s=0.016), False, 1.0)
def test_whatever_keeps_coming_each_kind_of_slice_comes_soon(
    first: list[Request], repeated: list[Request], places: int, costs: Costs, batch: bool, max_gap_s: float
) -> None:
    """A prompt waits for as many beginnings as its last slice took the time of, here at most 16, each with its first
    step and a step of each of the other batches. An answer waits for the slices that the gap has room for, if these are
    more."""
    coming = [replace(each, tokens_s=[]) for each in (*first, *repeated * (150 // len(repeated)))]
    simulation = Simulation(SlicePolicy(CHUNK, max_gap_s), costs, coming, places, batch).run()
    fit = ceil(max_gap_s / min(costs.step_s, costs.begin_s, costs.encode_s)) + places
    for kind, slices in longest_waits(simulation.ran).items():
        assert slices <= max(16 * (places + 1), fit if isinstance(kind, int) else 0)


# All together

costs_of_a_model = st.builds(
    Costs,
    step_s=st.floats(0.0001, 0.08),
    token_s=st.floats(1e-5, 0.02),
    begin_s=st.floats(0, 0.15),
)
arrivals = st.lists(
    st.builds(
        Request,
        prompt=st.integers(1, 700),
        answer=st.integers(1, 60),
        at_s=st.floats(0, 3),
        points=st.frozensets(st.integers(1, 700), max_size=4),
    ),
    min_size=2,
    max_size=9,
)


@given(costs=costs_of_a_model, requests=arrivals, places=st.integers(1, 8), chunk=st.sampled_from([16, 128, 2048]))
def test_the_gap_of_a_stream_is_bounded(costs: Costs, requests: list[Request], places: int, chunk: int) -> None:
    """With constant costs, only the first step of another answer comes on top of the promised gap."""
    simulation = Simulation(learned(costs, chunk), costs, requests, places).run()
    round_s = costs.step_s * max(len(ran.work.decoding) for ran in simulation.ran)
    promised_s = max(GAP_S, round_s + max(costs.begin_s, LEAST_SLICE_TOKENS * costs.token_s))
    assert max(request.gap_s for request in requests) <= promised_s + costs.step_s + 1e-6
    assert all(request.ended for request in requests)


@given(costs=costs_of_a_model, requests=arrivals, places=st.integers(1, 8), row_s=st.floats(0, 0.01))
@example(  # the batch grows from one row to four in one gap, in which four answers take their first steps
    costs=Costs(step_s=1 / 64, token_s=1e-5),
    requests=[Request(1, 60), Request(1, 1, at_s=0.01), *(Request(1, 60, at_s=0.01) for _ in range(3))],
    places=4,
    row_s=1 / 128,
)
def test_the_gap_of_a_row_of_a_batch_is_bounded(
    costs: Costs, requests: list[Request], places: int, row_s: float
) -> None:
    """Two things come on top of the promised gap. The first step of one new batch, which has one row, may follow the
    last slice that fits. And a slice fits by the last steps of the batch, which may know one row of `places`; after
    a slice that need not fit, the round that is promised has all the rows."""
    costs = replace(costs, row_s=row_s)
    simulation = Simulation(learned(costs), costs, requests, places, batch=True).run()
    unforeseen_s = costs.step(places) - costs.step(1)
    round_s = costs.step(places) + max(costs.begin_s, LEAST_SLICE_TOKENS * costs.token_s)
    promised_s = max(GAP_S + unforeseen_s, round_s)
    assert max(request.gap_s for request in requests) <= promised_s + costs.step(1) + 1e-6
    assert all(request.ended for request in simulation.requests)


def waits(ran: list[Ran]) -> Iterator[list[Ran]]:
    """Yields the runs of steps for which other work had to wait."""
    steps: list[Ran] = []
    for one in [*ran, None]:
        if one and isinstance(one.slice, Decode) and (one.work.startable or one.work.prefilling):
            steps.append(one)
        else:
            yield steps
            steps = []


@given(
    costs=costs_of_a_model,
    requests=arrivals,
    batch=st.booleans(),
    seed=st.integers(0, 1 << 30),
    max_gap_s=st.sampled_from([0.001, 0.1, 1.0]),
)
def test_all_work_advances_whatever_the_clock_says(
    costs: Costs, requests: list[Request], batch: bool, seed: int, max_gap_s: float
) -> None:
    """While other work waits, no batch steps twice; and every request ends."""
    noise = random.Random(seed)
    costs = replace(costs, noise=lambda: noise.choice([0.0, 0.3, 1.0, 1.0, 1.0, 2.0, 100.0]))
    simulation = Simulation(SlicePolicy(CHUNK, max_gap_s), costs, requests, 6, batch).run()
    assert all(request.ended for request in requests)
    for steps in waits(simulation.ran):
        batches = [ran.work.decoding[ran.slice.index] for ran in steps if isinstance(ran.slice, Decode)]
        assert len(batches) == len(set(batches))
