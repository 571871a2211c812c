"""One core for the engine: when its threads are bound and freed, and that the kernel really does it."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.engine.platform import affinity
from runner.engine.platform.affinity import OneCore, keep_together


class Desk:
    """A clock and threads, both moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ran = 0.0
        self.moves: list[str] = []

    def bind(self) -> None:
        self.moves.append("bind")

    def free(self) -> None:
        self.moves.append("free")

    def cpu_s(self) -> float:
        return self.ran

    def work(self, one: OneCore, seconds: float, share: float = 1.0) -> None:
        """In slices of 10 ms, of which the threads run a share."""
        for _ in range(round(seconds / 0.01)):
            one.work()
            self.now += 0.01
            self.ran += 0.01 * share
        one.work()

    def answer(self, one: OneCore, seconds: float, bound_s: float, free_s: float) -> float:
        """Steps of an answer, each as long as the way takes. Returns the share of steps in which they were bound."""
        bound = steps = 0
        while seconds > 0:
            one.work()
            is_bound = self.moves[-1:] == ["bind"]
            step_s = bound_s if is_bound else free_s
            self.now += step_s
            self.ran += step_s
            one.took(1, step_s)
            seconds -= step_s
            bound += is_bound
            steps += 1
        return bound / steps


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk()
    monkeypatch.setattr(affinity, "perf_counter", lambda: desk.now)
    return desk


def test_threads_are_bound_when_work_begins_and_freed_when_it_ends(desk: Desk) -> None:
    one = OneCore(desk)
    assert not desk.moves
    desk.work(one, 3.0)
    assert desk.moves == ["bind"]
    one.rest()
    one.rest()
    assert desk.moves == ["bind", "free"]
    desk.work(one, 0.01)
    assert desk.moves == ["bind", "free", "bind"]


def test_a_core_that_others_want_too_is_left_for_a_while(desk: Desk) -> None:
    one = OneCore(desk)
    desk.work(one, 0.3, share=0.5)
    assert desk.moves == ["bind", "free"]
    desk.work(one, 1.5)
    assert desk.moves == ["bind", "free"]
    desk.work(one, 1.0)
    assert desk.moves == ["bind", "free", "bind"]
    desk.work(one, 5.0)
    assert desk.moves == ["bind", "free", "bind"]


def test_little_waiting_is_no_reason_to_leave(desk: Desk) -> None:
    one = OneCore(desk)
    desk.work(one, 5.0, share=0.85)
    assert desk.moves == ["bind"]


def test_time_at_rest_is_not_held_against_the_core(desk: Desk) -> None:
    one = OneCore(desk)
    desk.work(one, 0.1)
    one.rest()
    desk.now += 60.0
    desk.work(one, 1.0)
    assert desk.moves == ["bind", "free", "bind"]


def test_rest_while_another_wants_the_core_frees_nothing_twice(desk: Desk) -> None:
    one = OneCore(desk)
    desk.work(one, 0.5, share=0.1)
    one.rest()
    assert desk.moves == ["bind", "free"]


def test_they_stay_free_where_that_is_faster(desk: Desk) -> None:
    one = OneCore(desk)
    assert desk.answer(one, 60.0, bound_s=0.010, free_s=0.008) < 0.2
    one.rest()
    assert desk.answer(one, 20.0, bound_s=0.010, free_s=0.008) < 0.2, "it is remembered"


def test_they_stay_together_where_that_is_faster(desk: Desk) -> None:
    assert desk.answer(OneCore(desk), 60.0, bound_s=0.008, free_s=0.010) > 0.85


def test_prompts_have_one_core_where_answers_are_faster_on_all(desk: Desk) -> None:
    one = OneCore(desk)
    desk.answer(one, 60.0, bound_s=0.010, free_s=0.008)
    one.rest()
    for _ in range(3):
        del desk.moves[:]
        one.work(prompts=True)
        desk.now += 0.1
        desk.ran += 0.1
        one.work(prompts=True)
        assert desk.moves == ["bind"]
        assert desk.answer(one, 0.5, bound_s=0.010, free_s=0.008) == 0, "from the first step on"
        assert desk.moves == ["bind", "free"]
        one.rest()


def in_a_thread(work: Callable[[], None]) -> None:
    """Whatever it does to the affinity of its thread ends with it."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as fault:  # told to the test below
            faults.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if faults:
        raise faults[0]


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and a choice of cores"
)
def test_the_caller_and_what_it_starts_share_a_core_and_nobody_else_does() -> None:
    started: list[int] = []
    done, ready = threading.Event(), threading.Event()

    def mlx() -> None:
        started.append(threading.get_native_id())
        ready.set()
        done.wait(30)

    def start() -> None:
        threading.Thread(target=mlx).start()
        ready.wait(30)

    def work() -> None:
        everywhere = os.sched_getaffinity(0)
        one = keep_together(start)
        try:
            assert one is not None
            (other,) = started
            main = threading.main_thread().native_id
            assert main is not None
            assert os.sched_getaffinity(0) == os.sched_getaffinity(other) == everywhere
            assert os.sched_getscheduler(0) == os.sched_getscheduler(other) == os.SCHED_OTHER
            one.work()
            assert len(os.sched_getaffinity(0)) == 1
            assert os.sched_getaffinity(other) == os.sched_getaffinity(0)
            assert os.sched_getaffinity(main) == everywhere
            policies = [os.sched_getscheduler(number) for number in (0, other, main)]
            assert policies == [os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER]
            one.rest()
            assert os.sched_getaffinity(0) == os.sched_getaffinity(other) == everywhere
            assert os.sched_getscheduler(0) == os.sched_getscheduler(other) == os.SCHED_OTHER
        finally:
            done.set()

    in_a_thread(work)


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and a choice of cores"
)
def test_where_there_is_no_choice_everything_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        pytest.fail("nothing is started")

    def refused(number: int, cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            assert keep_together(never) is None
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_setaffinity", refused)
            assert keep_together(never) is None
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert keep_together(never) is None

    in_a_thread(work)


def test_a_thread_that_has_ended_is_on_no_core(tmp_path: Path) -> None:
    if sys.platform == "linux":
        assert affinity._cores(1 << 22) == set()
