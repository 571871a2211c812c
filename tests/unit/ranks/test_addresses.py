"""Which addresses ranks may use."""

import errno
import socket

import pytest

from runner.addresses import parse_address, parse_listen_address, unfit
from runner.errors import RankError
from runner.ranks.start import RemoteFollower


@pytest.mark.parametrize("text", ["10.0.0.2:11600", "studio-2.local:1", "localhost:65535"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.2", "10.0.0.2:", ":1", "10.0.0.2:65536", "[::1]:1", "a:b:1", "http://a:1", "a :1", "-x:1", "a:+1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.2", "172.16.0.1", "172.31.9.9", "192.168.1.1", "169.254.3.4", "100.64.0.1", "100.127.0.1"],
)
def test_private_networks_are_fit(host: str) -> None:
    assert unfit(host) == ""
    assert parse_listen_address(f"{host}:0") == (host, 0)


@pytest.mark.parametrize("host", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "193.168.1.1", "224.0.0.1"])
def test_public_networks_are_not(host: str) -> None:
    with pytest.raises(ValueError, match=rf"^{host}:1: it is public, and what ranks exchange is not encrypted"):
        parse_listen_address(f"{host}:1")
    with pytest.raises(RankError, match=rf"^rank 1 \({host}:1\): {host}: it is public"):
        RemoteFollower(1, f"{host}:1", b"")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (socket.gaierror(-2, "Name or service not known"), "no machine of this name: .*Name or service not known"),
        (UnicodeError("label too long"), "no machine of this name: label too long"),
        (TimeoutError(), "no answer for 10 s; is `mlx-runner follow` running there, and does no firewall stop it"),
        (OSError(errno.EHOSTUNREACH, ""), "no route to host; is `mlx-runner follow` running there"),
    ],
)
def test_a_machine_that_cannot_be_reached_is_named(fault: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        raise fault

    monkeypatch.setattr(socket, "gethostbyname", fail)
    with pytest.raises(RankError, match=rf"^rank 3 \(studio-2:11600\): {why}"):
        RemoteFollower(3, "studio-2:11600", b"")


@pytest.mark.parametrize("text", ["0.0.0.0:1", "localhost:1", "studio.local:1", "10.0.0:1", "10.0.0.02:1"])
def test_one_network_is_listened_on(text: str) -> None:
    with pytest.raises(ValueError, match=r"give the (IPv4 address|address of one)"):
        parse_listen_address(text)
