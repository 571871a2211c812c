"""Tests of `Victim` itself: a storm notices what it promises to notice and is patient with slow machines."""

import threading

import pytest

from tests.process.hostile.victim import Victim


def test_a_status_that_does_not_come_is_infinitely_late(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(victim.process, "poll_ready", lambda _: asked.set())
    with victim.watched() as took:
        assert asked.wait(30)
    assert min(took) == float("inf")


def test_time_in_which_the_process_computes_nothing_is_not_its_fault(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, asked = threading.Event(), threading.Event()

    def poll(timeout_s: float) -> bool:
        asked.set()
        return not never.wait(1)

    monkeypatch.setattr(victim.process, "poll_ready", poll)
    with victim.watched() as took:
        assert asked.wait(30)
    assert max(took) < 0.5


async def test_memory_that_comes_back_late_has_come_back(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([0, 1 << 20, 0])
    monkeypatch.setattr(victim, "rss_bytes", lambda: next(told))
    async with victim.storm(1 << 19):
        pass


async def test_memory_that_stays_is_noticed(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([0, 1 << 20, 1 << 20])
    monkeypatch.setattr(victim, "rss_bytes", lambda: next(told))
    monkeypatch.setattr("tests.process.hostile.victim.RETURN_S", 0.0)
    with pytest.raises(AssertionError, match="1 MiB more"):
        async with victim.storm(1 << 19):
            pass
