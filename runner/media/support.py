"""What a model that sees makes of requests: markers become tokens, from headers alone, and pixels are decoded.

Nothing here runs on the engine thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import ClassVar

from protocol import Media
from runner.engine.request import ShownPrompt
from runner.errors import MediaError, RequestError
from runner.logs import Log
from runner.media.families import Family
from runner.media.geometry import Geometry
from runner.media.header import IMAGE, kind_of, read_header
from runner.media.prompt import Marker, MediaNames, MediaPrompt, Picture, split_markers
from runner.media.rows import RowStore
from runner.tokenizer import Tokenizer

log = Log(__name__)

# --- The name of a prepared picture in caches: equal names only for pictures that give equal soft tokens.

DIGEST_BYTES = 32


def digest(kind: str, family: str, version: int, geometry: Geometry, data: bytes) -> bytes:
    """Returns 256 bits over what an item is made of: its kind, who prepares it and how, its size, and its bytes.

    `family` and `version` are those of a family in `runner.media.families`. Each part is preceded by its length, so
    no two lists of parts make the same stream. Bytes after the end of a picture count: a miss at worst.
    """
    numbers = ",".join(map(str, (version, *geometry)))
    state = blake2b(digest_size=DIGEST_BYTES, person=b"runner.media")
    for part in (kind.encode(), family.encode(), numbers.encode(), data):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


@dataclass(frozen=True)
class MediaSupport:
    """The `Vision` of a model that sees. Any thread may use it."""

    sees: ClassVar[bool] = True
    family: Family
    start: int
    soft: int
    end: int
    """The ids around and in the place of a picture's soft tokens."""
    names: MediaNames
    store: RowStore

    def check(self, media: Sequence[Media]) -> None:
        """Takes all media; `expand` refuses those that are not pictures."""

    def expand(
        self,
        prompt: str,
        media: Sequence[Media],
        tokenizer: Tokenizer,
        context_length: int,
        left: Callable[[], bool] = lambda: False,
        *,
        bos: bool = True,
    ) -> MediaPrompt | None:
        """Returns the tokens of a prompt with pictures, in the words that hosts know where it cannot. None if it has no
        marker.

        Each text between markers is tokenized by itself, with `bos` the first one as a whole prompt. Stops as soon as
        there are more than `context_length` tokens, so that the work is bounded: the pictures of such a prompt, which
        is refused, have no names. Raises RequestError, also when `left` returns True, which is asked before
        each picture.
        """
        items = {item.id: item for item in media}
        seen: dict[int, Picture] = {}
        parts: list[list[int] | Marker] = []
        count = 0
        for part in split_markers(prompt):
            if isinstance(part, Marker):
                if left():
                    raise RequestError("the client has left")
                picture = seen.get(part.id) or seen.setdefault(part.id, self._unnamed(part.id, items))
                before, after = self.around(picture)
                parts += [[*before], part, [*after]]
                count += picture.geometry.tokens + len(before) + len(after)
            else:
                ids = tokenizer.encode(part) if bos and not parts else tokenizer.encode_without_bos(part)
                parts.append(ids)
                count += len(ids)
            if count > context_length:
                break
        else:
            if unused := items.keys() - seen.keys():
                log.warning("media that no marker names", ids=" ".join(map(str, sorted(unused)[:8])))
            if not seen:
                return None
            seen = {number: self._named(picture) for number, picture in seen.items()}
        shown = [seen[part.id] if isinstance(part, Marker) else part for part in parts]
        return MediaPrompt(shown, self.soft, mrope=self.family.mrope)

    def around(self, picture: Picture) -> tuple[Sequence[int], Sequence[int]]:  # noqa: ARG002
        """Returns the tokens before and after a picture's own."""
        return [self.start], [self.end]

    def _unnamed(self, number: int, items: Mapping[int, Media]) -> Picture:
        """Returns a picture without its name, for which all of the file must be read."""
        item = items.get(number)
        if item is None:
            raise RequestError(f"invalid image index: {number}")
        kind = item.kind or kind_of(item.data) or IMAGE  # the header of unknown bytes says what would be read
        if kind != IMAGE:
            raise RequestError(f"{self.family.title} does not support {kind} input")
        try:
            header = read_header(item.data)
            geometry = self.family.geometry(header.width, header.height)
        except MediaError as error:
            raise RequestError(str(error)) from error
        return Picture(item.data, header, geometry, 0)

    def _named(self, picture: Picture) -> Picture:
        of = digest(IMAGE, self.family.name, self.family.version, picture.geometry, picture.data)
        return replace(picture, name=self.names.name_of(of))

    def decode(self, prompt: ShownPrompt, left: Callable[[], bool]) -> Iterator[Future[None]]:
        for picture in _pictures(prompt):
            if not self.store.is_sound(picture):
                yield self.store.check(picture, left)

    def drop(self, prompt: ShownPrompt) -> None:
        for picture in _pictures(prompt):
            self.store.drop(picture)


def _pictures(prompt: ShownPrompt) -> list[Picture]:
    assert isinstance(prompt, MediaPrompt)
    return [span.picture for span in prompt.spans]
