"""The addresses at which ranks on several machines reach each other, as people write them."""

import re
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple

_HOST_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,5})")
_SHARED = IPv4Network("100.64.0.0/10")
"""The addresses of networks inside providers, and of private networks that span distant machines."""


class Address(NamedTuple):
    """A name or an IPv4 address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Returns the address in a text of the form HOST:PORT. Raises ValueError if the text has another form."""
    found = _HOST_PORT.fullmatch(text)
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"{text}: give HOST:PORT, such as 10.0.0.2:11600; IPv6 is not supported")
    return Address(found[1], int(found[2]))


def parse_listen_address(text: str) -> Address:
    """Returns the address in a text of the form ADDRESS:PORT. Raises ValueError for a name, or an `unfit` address."""
    address = parse_address(text)
    try:
        IPv4Address(address.host)
    except ValueError:
        raise ValueError(f"{text}: give the IPv4 address of one network of this machine, not a name") from None
    if why := unfit(address.host):
        raise ValueError(f"{text}: {why}")
    return address


def unfit(host: str) -> str:
    """Returns the reason why ranks must not use this IPv4 address. Empty if they can use it."""
    address = IPv4Address(host)
    if address.is_unspecified:
        return "it stands for every network of this machine: give the address of one"
    if address.is_private or address.is_loopback or address.is_link_local or address in _SHARED:
        return ""
    return "it is public, and what ranks exchange is not encrypted: use an address of a private network"
