"""Turns a prompt with markers into tokens. Reads headers of pictures, never a pixel; runs off the engine thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from protocol import Media
from runner.errors import MediaError, RequestError
from runner.logs import Log
from runner.pictures.formats import IMAGE, kind_of
from runner.pictures.geometry import Geometry
from runner.pictures.header import read_header
from runner.pictures.prompt import Marker, Picture, PicturePrompt, split_markers
from runner.pictures.support import PictureSupport
from runner.tokenizer import Tokenizer

log = Log(__name__)

# --- The name of a prepared picture in caches: equal names only for pictures that give equal soft tokens.

DIGEST_BYTES = 32


def digest(kind: str, family: str, version: int, geometry: Geometry, data: bytes) -> bytes:
    """Returns 256 bits over what an item is made of: its kind, who prepares it and how, its size, and its bytes.

    `family` and `version` are those of a family in `runner.pictures.families`. Each part is preceded by its length, so
    no two lists of parts make the same stream. Bytes behind the end of a picture count: a miss at worst.
    """
    numbers = ",".join(map(str, (version, *geometry)))
    state = blake2b(digest_size=DIGEST_BYTES, person=b"runner.media")
    for part in (kind.encode(), family.encode(), numbers.encode(), data):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def expand(
    prompt: str,
    media: Sequence[Media],
    pictures: PictureSupport,
    tokenizer: Tokenizer,
    context_length: int,
    left: Callable[[], bool] = lambda: False,
    *,
    bos: bool = True,
) -> PicturePrompt:
    """Returns the tokens of a prompt with pictures, in the words that hosts know where it cannot.

    Each text between markers is tokenized by itself, with `bos` the first one as a whole prompt. Stops as soon as there
    are more than `context_length` tokens, so that the work is bounded: pictures of such a prompt, which nobody will
    compute, have no names. Raises RequestError, also when `left` returns True, which is asked before each picture.
    """
    items = {item.id: item for item in media}
    seen: dict[int, Picture] = {}
    parts: list[list[int] | Marker] = []
    count = 0
    for part in split_markers(prompt):
        if isinstance(part, Marker):
            if left():
                raise RequestError("the client has left")
            picture = seen.get(part.id) or seen.setdefault(part.id, _unnamed(part.id, items, pictures))
            parts += [[pictures.start], part, [pictures.end]]
            count += picture.geometry.tokens + 2
        else:
            ids = tokenizer.encode(part) if bos and not parts else tokenizer.encode_without_bos(part)
            parts.append(ids)
            count += len(ids)
        if count > context_length:
            break
    else:
        if unused := items.keys() - seen.keys():
            log.warning("media that no marker names", ids=" ".join(map(str, sorted(unused)[:8])))
        seen = {number: _named(picture, pictures) for number, picture in seen.items()}
    shown = [seen[part.id] if isinstance(part, Marker) else part for part in parts]
    return PicturePrompt(shown, pictures.soft, mrope=pictures.family.mrope)


def _unnamed(number: int, items: Mapping[int, Media], pictures: PictureSupport) -> Picture:
    """Returns a picture without its name, for which all of the file must be read."""
    item = items.get(number)
    if item is None:
        raise RequestError(f"invalid image index: {number}")
    family = pictures.family
    kind = item.kind or kind_of(item.data) or IMAGE  # the header of unknown bytes says what would be read
    if kind != IMAGE:
        raise RequestError(f"{family.title} does not support {kind} input")
    try:
        header = read_header(item.data)
        geometry = family.geometry(header.width, header.height)
    except MediaError as error:
        raise RequestError(str(error)) from error
    return Picture(item.data, header, geometry, 0)


def _named(picture: Picture, pictures: PictureSupport) -> Picture:
    family = pictures.family
    of = digest(IMAGE, family.name, family.version, picture.geometry, picture.data)
    return replace(picture, name=pictures.names.name_of(of))
