"""The names of segments: they carry the index, so a listing of the directory is all that a plan needs."""

import re
from typing import NamedTuple

ENTRIES, TAIL, STATE = "kv", "tail", "state"
"""The kinds of segments: the entries of sliceable layers for all tokens of the segment; what layers with a tail hold at
its end; the states of layers at its end."""
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.([0-9]{1,10})-([0-9]{1,10})\.(kv|tail|state)")
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9]+\.tmp")
_NAMESPACE = re.compile(r"v([0-9]+)-[0-9a-f]{32}")


class Name(NamedTuple):
    """A segment: the tokens [start, stop) of every prompt that has these points there."""

    first: str
    """The point at `start`; of a tail and a state, that at `stop`."""
    last: str
    """The point at `stop`."""
    start: int
    stop: int
    kind: str
    """ENTRIES, TAIL or STATE."""

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.first}-{self.last}.{self.start}-{self.stop}.{self.kind}"


def parse_name(file: str) -> Name | None:
    """Returns the segment of a file of this name; None if it is the name of something else."""
    found = _NAME.fullmatch(file)
    if found is None:
        return None
    first, last, start, stop, kind = found.groups()
    name = Name(first, last, int(start), int(stop), kind)
    sound = name.start < name.stop and (kind == ENTRIES or first == last) and name.file == file
    return name if sound else None


def temporary(pid: int, number: int) -> str:
    """Returns the name of a file that is still being written."""
    return f".{pid}-{number}.tmp"


def is_temporary(file: str) -> bool:
    """Returns True for the name of a file that is, or was, being written."""
    return _TEMPORARY.fullmatch(file) is not None


def format_of(directory: str) -> int | None:
    """Returns the version of the files in a directory of segments; None for a directory of anything else."""
    found = _NAMESPACE.fullmatch(directory)
    return int(found[1]) if found else None
