"""Prompts with media: markers become tokens, and every item gets a name that no other item has.

A prompt has two lists of the same length. The sampler and the forward use the *ids*. Caches compare the *keys*, in
which an item's name, a negative number, stands for each soft token of the item, so that two prompts differ where their
media differ. Objects of all classes but `MediaNames` are immutable, and any thread may read them.
"""

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from runner.media.families import Clip, SoundFamily
from runner.media.geometry import Geometry
from runner.media.header import PictureHeader
from runner.media.sound_header import SoundHeader

_MARKER = re.compile(r"\[img-([0-9]+)\]")
_MOST_NAMES = 1 << 16
_MOST_DIGITS = 20
"""The most digits that are read of a marker's number; the number of an item has fewer digits."""


class Marker(NamedTuple):
    """The marker `[img-N]` in a prompt: the place of the item whose number is `id`."""

    id: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Item(ABC):
    """A picture or a sound in a prompt: the bytes of its file, and its sizes."""

    data: bytes
    name: int = 0
    """0 until a name is given, then negative. Only items of the same bytes and preparation share a name."""
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    """`before` and `after` are the ids around the item's soft tokens."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of the item's soft tokens; 1, a lower bound, if only decoding finds the number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture(Item):
    header: PictureHeader
    geometry: Geometry
    ids: Sequence[int] = ()
    """The ids of the picture's soft tokens; empty if all have the same id, `soft_id` of the prompt."""

    @property
    def tokens(self) -> int:
        return self.geometry.tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class UnmeasuredPicture(Item):
    """A picture whose number of soft tokens is not known yet, because no picture of its size was measured."""

    header: PictureHeader

    @property
    def tokens(self) -> int:
        return 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Sound(Item):
    """A sound. If `clip` is None, only decoding finds the number of its soft tokens."""

    header: SoundHeader
    family: SoundFamily
    clip: Clip | None

    @property
    def tokens(self) -> int:
        return 1 if self.clip is None else self.clip.tokens


class Span(NamedTuple):
    """The place of one item's soft tokens in a prompt: offsets from `start` up to, but without, `stop`."""

    start: int
    stop: int
    item: Item


class MediaNames:
    """The names of media by digest. No two digests ever get the same name, so a forgotten name can cause a miss in the
    cache, but never a wrong hit."""

    def __init__(self, most: int = _MOST_NAMES) -> None:
        """Remembers the `most` names that were asked for last."""
        self._most = most
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._last = 0
        self._lock = Lock()

    def name_of(self, digest: bytes) -> int:
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
        """Returns the digest of the item with this name; None if the name is forgotten."""
        return self._digests.get(name)


class MediaPrompt:
    """The tokens of a prompt with media."""

    def __init__(
        self, parts: Sequence[Sequence[int] | Item], soft_id: int, sound_id: int = -1, *, mrope: bool = False
    ) -> None:
        """Joins `parts`: the ids of texts, and items. `soft_id` is the id of a picture's soft tokens, `sound_id` of a
        sound's. With `mrope`, positions have three channels, and `parts` must contain no sound."""
        self.ids: list[int] = []
        self.keys: list[int] = []
        spans: list[Span] = []
        for part in parts:
            if isinstance(part, Item):
                start, tokens = len(self.ids) + len(part.before), part.tokens
                own = part.ids if isinstance(part, Picture) else [sound_id] * tokens
                self.ids += [*part.before, *(own or [soft_id] * tokens), *part.after]
                self.keys += [*part.before, *[part.name] * tokens, *part.after]
                spans.append(Span(start, start + tokens, part))
            else:
                self.ids += part
                self.keys += part
        self.spans = tuple(spans)
        self._mrope = mrope
        self._positions: tuple[list[int], list[int], list[int]] | None = None
        self.shift = sum(_geometry(item).extent - (stop - start) for start, stop, item in spans) if mrope else 0
        """The position of any token after the prompt minus the offset of that token; 0 or negative."""

    @property
    def nbytes(self) -> int:
        return sum({id(span.item): len(span.item.data) for span in self.spans}.values())

    def next_span(self, offset: int) -> Span | None:
        """Returns the first span with soft tokens at or after `offset`; None if there is none."""
        return next((span for span in self.spans if span.stop > offset), None)

    def positions(self, start: int, stop: int) -> list[list[int]] | None:
        """Returns the positions of the tokens from `start` to `stop` in three channels: time, row and column. Returns
        None if positions equal offsets: without `mrope`, and before the first picture."""
        if not self._mrope or stop <= self.spans[0].start:
            return None
        if self._positions is None:
            self._positions = self._all_positions()
        answer = range(max(start, len(self.ids)) + self.shift, stop + self.shift)
        return [[*channel[start:stop], *answer] for channel in self._positions]

    def _all_positions(self) -> tuple[list[int], list[int], list[int]]:
        times, rows, columns = list[int](), list[int](), list[int]()
        counter = at = 0
        for start, stop, item in self.spans:
            text, tokens = range(counter, counter + start - at), range(stop - start)
            counter += start - at
            geometry = _geometry(item)
            width = geometry.token_columns
            times += [*text, *(counter for _ in tokens)]
            rows += [*text, *(counter + token // width for token in tokens)]
            columns += [*text, *(counter + token % width for token in tokens)]
            counter += geometry.extent
            at = stop
        rest = range(counter, counter + len(self.ids) - at)
        return [*times, *rest], [*rows, *rest], [*columns, *rest]


def split_markers(prompt: str) -> Iterator[str | Marker]:
    """Yields the texts of a prompt, which may be empty, and the markers between them: text, marker, text, ..."""
    at = 0
    for found in _MARKER.finditer(prompt):
        yield prompt[at : found.start()]
        yield Marker(int(found[1].lstrip("0")[:_MOST_DIGITS] or "0"))
        at = found.end()
    yield prompt[at:]


def _geometry(item: Item) -> Geometry:
    assert isinstance(item, Picture)
    return item.geometry
