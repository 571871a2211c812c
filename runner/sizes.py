"""Parses and formats amounts of memory, and formats counts and lists of names, as people write them."""

import re
from collections.abc import Sequence

import msgspec

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:(%)|(?:([kmgt])i?)?b?)", re.IGNORECASE)
_POWERS = {"k": 10, "m": 20, "g": 30, "t": 40}


class Bound(msgspec.Struct, frozen=True):
    """A limit in bytes and a limit in percent of a device's memory. None means no such limit."""

    bytes: int | None = None
    percent: float | None = None

    def bytes_of(self, limit_bytes: int) -> int:
        """Returns the lower of both limits, in bytes, on a device with `limit_bytes` of memory."""
        share = limit_bytes if self.percent is None else int(limit_bytes * self.percent / 100)
        return share if self.bytes is None else min(share, self.bytes)


def parse_bound(text: str) -> Bound:
    """Parses `1048576`, `512MiB`, `8G`, `1.5gb`, `25%`, or an amount and a percentage with a comma between them.

    K, M, G and T are powers of 1024, with i, B, iB or nothing after them. Raises ValueError for anything else.
    """
    amount: int | None = None
    percent: float | None = None
    for part in text.split(","):
        found = _AMOUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} is not an amount of memory")
        number, is_share, power = found.groups()
        if is_share and percent is None and float(number) <= 100:
            percent = float(number)
        elif not is_share and amount is None:
            amount = _scaled(number, _POWERS[power.lower()] if power else 0)
        else:
            raise ValueError(f"{part!r} is more than 100%, or the second of its kind")
    return Bound(amount, percent)


def sized(size: int) -> str:
    """Formats a size as `1.1 GB`, in powers of 1000 like the sizes of disks."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "KB")):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size} B"


def _scaled(number: str, power: int) -> int:
    """Returns `number` times 2**power, rounded down, exact for any number of digits."""
    whole, _, fraction = number.partition(".")
    return (int(whole + fraction) << power) // int("1" + "0" * len(fraction))


def counted(number: int, noun: str) -> str:
    """Formats a count: `1 file`, `2 files`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def listed(names: Sequence[str], most: int) -> str:
    """Formats a list of names: `a, b and 3 more`."""
    beyond = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{beyond}"
