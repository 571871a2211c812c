"""A web page in the user's browser must not reach the runner."""

import pytest

from runner.server.guards import is_local


@pytest.mark.parametrize("host", [None, "127.0.0.1:41000", "localhost", "localhost:80", "[::1]:41000", "127.0.0.1"])
@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "http://127.0.0.1", "https://app.localhost"])
def test_local_programs_are_accepted(host: str | None, origin: str | None) -> None:
    for site in (None, "none", "same-origin", "same-site"):
        assert is_local(host, origin, site)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:41000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "10.0.0.1"],
)
def test_a_rebound_host_name_is_refused(host: str) -> None:
    assert not is_local(host, None, None)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://localhost.evil.example", "file://"])
def test_a_foreign_page_is_refused(origin: str) -> None:
    assert not is_local("127.0.0.1:41000", origin, None)


def test_a_foreign_page_that_hides_its_origin_is_refused() -> None:
    assert not is_local("127.0.0.1:41000", None, "cross-site")
