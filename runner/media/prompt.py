"""Prompts with pictures: markers become tokens, and every picture gets a name that no other picture has.

A prompt has two forms of the same length. Its *ids* are what the sampler counts and what the forward looks up. Its
*keys* are what the caches compare: at the soft tokens of a picture they are the picture's name, a negative number, so
that two prompts part where their pictures differ. Everything here is immutable but `MediaNames`; any thread may read
it.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from runner.media.geometry import Geometry
from runner.media.header import Header

_MARKER = re.compile(r"\[img-([0-9]+)\]")
_MOST_NAMES = 1 << 16
_MOST_DIGITS = 20
"""An item's number has fewer."""


class Marker(NamedTuple):
    """The place of a picture in a text."""

    id: int


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that a prompt shows: its file, still encoded, and how large it will be."""

    data: bytes
    header: Header
    geometry: Geometry
    name: int
    """Negative: that of the same bytes, prepared in the same way, and of no other picture."""
    ids: Sequence[int] = ()
    """The tokens in its place; empty if all are the same soft token."""


class Span(NamedTuple):
    """The soft tokens of one picture in a prompt, from `start` to `stop`."""

    start: int
    stop: int
    picture: Picture


class MediaNames:
    """Names for pictures, by the digests of what they look like to the model. Never uses a name twice; forgetting an
    old one costs a miss in the cache, never a wrong hit."""

    def __init__(self, most: int = _MOST_NAMES) -> None:
        """Remembers the last `most` pictures."""
        self._most = most
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._last = 0
        self._lock = Lock()

    def name_of(self, digest: bytes) -> int:
        """Returns the name of the picture with this digest."""
        with self._lock:
            name = self._names.get(digest)
            if name is None:
                self._last -= 1
                name = self._names[digest] = self._last
                self._digests[name] = digest
                if len(self._names) > self._most:
                    del self._digests[self._names.popitem(last=False)[1]]
            self._names.move_to_end(digest)
            return name

    def digest_of(self, name: int) -> bytes | None:
        """Returns the digest of the picture of this name; None if it is forgotten."""
        return self._digests.get(name)


class MediaPrompt:
    """The tokens of a prompt with pictures."""

    def __init__(self, parts: Sequence[Sequence[int] | Picture], soft_id: int, *, mrope: bool = False) -> None:
        """`parts` are the ids of texts, and pictures. With `mrope` the positions of soft tokens have three channels."""
        self.ids: list[int] = []
        self.keys: list[int] = []
        spans = []
        for part in parts:
            if isinstance(part, Picture):
                start, tokens = len(self.ids), part.geometry.tokens
                self.ids += part.ids or [soft_id] * tokens
                self.keys += [part.name] * tokens
                spans.append(Span(start, start + tokens, part))
            else:
                self.ids += part
                self.keys += part
        self.spans = tuple(spans)
        self._mrope = mrope
        self._positions: tuple[list[int], list[int], list[int]] | None = None
        self.shift = sum(_advance(span) - (span.stop - span.start) for span in spans) if mrope else 0
        """The position of a token after the prompt, less its offset; 0 or negative."""

    @property
    def nbytes(self) -> int:
        """The bytes of the pictures' files."""
        return sum({id(span.picture): len(span.picture.data) for span in self.spans}.values())

    def next_span(self, offset: int) -> Span | None:
        """Returns the first picture that is not wholly before an offset."""
        return next((span for span in self.spans if span.stop > offset), None)

    def positions(self, start: int, stop: int) -> list[list[int]] | None:
        """Returns the positions of tokens in the three channels: time, row and column.

        None if they are the offsets, as they are in a prompt without such positions, and before its first picture.
        """
        if not self._mrope or stop <= self.spans[0].start:
            return None
        if self._positions is None:
            self._positions = self._all_positions()
        answer = range(max(start, len(self.ids)) + self.shift, stop + self.shift)
        return [[*channel[start:stop], *answer] for channel in self._positions]

    def _all_positions(self) -> tuple[list[int], list[int], list[int]]:
        times: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        counter = at = 0
        for start, stop, picture in self.spans:
            text = range(counter, counter + start - at)
            counter += start - at
            width = picture.geometry.token_columns
            tokens = range(stop - start)
            times += [*text, *(counter for _ in tokens)]
            rows += [*text, *(counter + token // width for token in tokens)]
            columns += [*text, *(counter + token % width for token in tokens)]
            counter += max(picture.geometry.token_rows, width)
            at = stop
        rest = range(counter, counter + len(self.ids) - at)
        return [*times, *rest], [*rows, *rest], [*columns, *rest]


def split_markers(prompt: str) -> Iterator[str | Marker]:
    """Yields the texts of a prompt, empty ones included, and the markers between them: text, marker, text, ..."""
    at = 0
    for found in _MARKER.finditer(prompt):
        yield prompt[at : found.start()]
        yield Marker(int(found[1].lstrip("0")[:_MOST_DIGITS] or "0"))
        at = found.end()
    yield prompt[at:]


def _advance(span: Span) -> int:
    """Returns how far a picture moves the counter of positions on."""
    return max(span.picture.geometry.token_rows, span.picture.geometry.token_columns)
