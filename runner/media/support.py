"""Requests to a model that sees or hears: markers become tokens, from headers alone, and media are decoded.

Nothing here runs on the engine thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import wraps
from hashlib import blake2b
from http import HTTPStatus
from typing import ClassVar, NamedTuple, ParamSpec, TypeVar

from protocol import Media
from runner.engine.ports import Steps
from runner.engine.request import ShownPrompt
from runner.errors import MediaError, RequestError
from runner.logs import Log
from runner.media.families import SoundFamily
from runner.media.header import AUDIO, IMAGE, media_kind, read_picture_header
from runner.media.prompt import (
    Item,
    Marker,
    MediaNames,
    MediaPrompt,
    Picture,
    Sound,
    UnmeasuredPicture,
    split_markers,
)
from runner.media.row_store import Pictures, RowStore
from runner.media.sound_header import read_sound_header
from runner.tokenizer import Tokenizer

log = Log(__name__)
Params = ParamSpec("Params")
Found = TypeVar("Found")

DIGEST_BYTES = 32


def digest(kind: str, family: str, version: int, sizes: Sequence[int], data: bytes) -> bytes:
    """Returns 256 bits over what an item is made of: its kind, who prepares it and how, to which sizes, and its bytes.

    `family` and `version` are those of a family in `runner.media.families`. Each part is preceded by its
    length, so no two lists of parts make the same stream. Bytes after the end of an item count: a miss at worst.
    """
    numbers = ",".join(map(str, (version, *sizes)))
    state = blake2b(digest_size=DIGEST_BYTES, person=b"runner.media")
    for part in (kind.encode(), family.encode(), numbers.encode(), data):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


class Hearing(NamedTuple):
    """The use that a model makes of sounds."""

    family: SoundFamily
    start: int
    soft: int
    end: int
    """The ids around and in the place of a sound's soft tokens."""


class _UnmeasuredError(RequestError):
    """A prompt shows media whose tokens only decoding tells. `prompt` shows these, and nothing else."""

    def __init__(self, prompt: MediaPrompt) -> None:
        super().__init__(
            "other pictures and sounds took its place meanwhile: send it again", HTTPStatus.SERVICE_UNAVAILABLE
        )
        self.prompt = prompt


def _measuring(read: Callable[Params, Found]) -> Callable[Params, Steps[Found]]:
    """Lets `read` yield media that have to be decoded, if there are any, and begin again after that."""

    @wraps(read)
    def steps(*args: Params.args, **kwargs: Params.kwargs) -> Steps[Found]:
        try:
            return read(*args, **kwargs)
        except _UnmeasuredError as error:
            yield error.prompt
        return read(*args, **kwargs)

    return steps


@dataclass(frozen=True)
class MediaSupport:
    """The `Vision` of a model that sees or hears. Any thread may use it."""

    sees: ClassVar[bool] = True
    pictures: Pictures | None
    """None if it only hears."""
    names: MediaNames
    store: RowStore
    hearing: Hearing | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Kind of media -> the text with which it is refused."""

    def check(self, media: Sequence[Media]) -> None:
        """Takes all media; `expand` refuses those of other kinds."""

    def markers(self, prompt: str) -> tuple[set[int], str]:
        parts = [*split_markers(prompt)]
        return {part.id for part in parts if isinstance(part, Marker)}, str(parts[-1])

    @_measuring
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
        """Returns the tokens of a prompt with media, in the words that hosts know where it cannot. None if it has no
        marker. First yields the items whose tokens only decoding tells.

        Each text between markers is tokenized by itself, with `bos` the first one as a whole prompt. Stops as soon as
        there are more than `context_length` tokens, so that the work is bounded: the media of such a prompt, which is
        refused, have no names. Raises RequestError, also when `left` returns True, which is asked before each item.
        """
        items = {item.id: item for item in media}
        seen: dict[int, Item] = {}
        parts: list[list[int] | Marker] = []
        count = 0
        for part in split_markers(prompt):
            if isinstance(part, Marker):
                if left():
                    raise RequestError("the client has left")
                item = seen.get(part.id) or seen.setdefault(part.id, self._unnamed(part.id, items))
                parts.append(part)
                count += item.tokens + len(item.before) + len(item.after)
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
            self._refuse_unmeasured([*seen.values()])
            seen = {number: self._named(item) for number, item in seen.items()}
        found = self._prompt([seen[part.id] if isinstance(part, Marker) else part for part in parts])
        if self.pictures is not None:
            self.pictures.check_prompt(found, context_length)
        return found

    @_measuring
    def join(
        self, before: Sequence[int], media: Sequence[Media], after: Sequence[int], left: Callable[[], bool]
    ) -> MediaPrompt:
        """Returns a prompt of ids, all of these media, and ids. Yields and raises as `expand` does."""
        items: list[Item] = []
        for each in media:
            if left():
                raise RequestError("the client has left")
            items.append(self._unnamed(each.id, {each.id: each}))
        self._refuse_unmeasured(items)
        return self._prompt([before, *map(self._named, items), after])

    def _refuse_unmeasured(self, items: Sequence[Item]) -> None:
        """Raises _UnmeasuredError if there are items whose tokens are not known yet."""
        if unmeasured := [
            item
            for item in items
            if isinstance(item, UnmeasuredPicture) or (isinstance(item, Sound) and item.clip is None)
        ]:
            raise _UnmeasuredError(MediaPrompt(unmeasured, -1))

    def _prompt(self, parts: Sequence[Sequence[int] | Item]) -> MediaPrompt:
        sound_id = -1 if self.hearing is None else self.hearing.soft
        if self.pictures is None:
            return MediaPrompt(parts, -1, sound_id)
        return MediaPrompt(parts, self.pictures.soft, sound_id, mrope=self.pictures.mrope)

    def _unnamed(self, number: int, items: Mapping[int, Media]) -> Item:
        """Returns an item without its name, for which all of the file must be read."""
        item = items.get(number)
        if item is None:
            raise RequestError(f"invalid image index: {number}")
        kind = item.kind or media_kind(item.data) or IMAGE  # the header of unknown bytes says what would be read
        try:
            if kind == AUDIO and self.hearing is not None:
                return self._sound(item.data, self.hearing)
            if kind == IMAGE and self.pictures is not None:
                return self.pictures.picture(item.data, read_picture_header(item.data))
        except MediaError as error:
            raise RequestError(str(error)) from error
        title = self.pictures.title if self.pictures is not None else "this model"
        raise RequestError(self.refusals.get(kind, f"{title} does not support {kind} input"))

    def _sound(self, data: bytes, hearing: Hearing) -> Sound:
        """Returns a sound, with its name if only decoding tells its length."""
        header = read_sound_header(data)
        clip = hearing.family.clip(header.samples) if header.is_exact else None
        sound = Sound(data, header, hearing.family, clip, 0, [hearing.start], [hearing.end])
        if clip is None:
            name = self._named(sound).name
            sound = replace(sound, name=name, clip=self.store.clip(name))
        return sound

    def _named(self, item: Item) -> Item:
        if item.name:
            return item
        assert isinstance(item, Picture | Sound)
        if isinstance(item, Sound):
            family = item.family
            of = digest(AUDIO, family.name, family.version, [family.frame_samples], item.data)
        else:
            assert self.pictures is not None
            of = digest(IMAGE, self.pictures.name, self.pictures.version, item.geometry, item.data)
        return replace(item, name=self.names.name_of(of))

    def decode(self, prompt: ShownPrompt, left: Callable[[], bool]) -> Iterator[Future[None]]:
        for item in _items(prompt):
            if not self.store.is_good(item):
                yield self.store.check(item, left)

    def drop(self, prompt: ShownPrompt) -> None:
        for item in _items(prompt):
            self.store.drop(item)


def _items(prompt: ShownPrompt) -> list[Item]:
    assert isinstance(prompt, MediaPrompt)
    return [span.item for span in prompt.spans]
