"""The limit of file descriptors, and the log line when none is left."""

import asyncio
import errno
import logging
import resource
from collections.abc import Iterator

import pytest

from runner.process.limits import DescriptorShortage, raise_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Restores the limits of this process afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_becomes_what_the_system_allows(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])


@pytest.mark.parametrize(("soft", "wanted"), [(256, [10240]), (20000, [])])
def test_a_limit_of_infinity_is_asked_for_as_ten_thousand(
    soft: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS: the hard limit is infinite, and to ask for as much is an error."""
    asked: list[int] = []

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        asked.append(limits[0])

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    raise_limit()
    assert asked == wanted


async def test_running_out_of_descriptors_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loop, shortage = asyncio.get_running_loop(), DescriptorShortage()
    for _ in range(128):
        shortage.handle(loop, {"message": "m", "exception": OSError(errno.EMFILE, "too many"), "socket": None})
    assert caplog.messages == ["new connections must wait"]
    assert not caplog.records[0].exc_info
    shortage.handle(loop, {"message": "other", "exception": OSError(errno.EMFILE, "too many")})
    shortage.handle(loop, {"message": "third", "exception": ValueError("x"), "socket": None})
    assert [message.split("\n")[0] for message in caplog.messages[1:]] == ["other", "third"]
