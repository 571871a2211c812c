"""Takes damaged pictures up to the queue: `python -m tests.unit.engine.pictures.fuzzing FORM COUNT SEED`.

Each goes the whole way of a request: base64 in a body, read in pieces, headers, tokens, names, then the decoder, which
looks before a request is queued. Memory is limited. It ends with status 0 if each picture was taken, or refused with
the text of a 400.
"""

import json
import random
import resource
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from protocol import CompletionReader, CompletionRequest
from runner.engine.pictures.support import PictureSupport
from runner.engine.request import Limits, checked_format, prepare
from runner.errors import MediaError, RequestError
from runner.media.families.family import Family
from runner.media.families.gemma4 import Gemma4
from runner.media.families.gemma4_unified import Gemma4Unified
from runner.media.families.glimmer import Glimmer
from runner.media.families.nemotron_h import NemotronH
from runner.media.families.qwen3_5 import Qwen35
from runner.media.pixels import PixelStore
from runner.media.prompt import PictureNames
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import byte_level
from tests.unit.media.fuzzing import MEMORY_BYTES, cases, pictures
from tests.unit.media.pictures import Here

CONTEXT = 3000
FAMILIES: tuple[Family, ...] = (
    *(Qwen35(max_pixels=65_536), Gemma4(budgets=(70,)), Gemma4Unified(budgets=(70,))),
    *(Glimmer(max_tokens=64), NemotronH(min_patches=4, max_patches=256)),
)
SIZES = (0, 1, 9999, 10_001, 50_000, 65_535, 1 << 24, (1 << 31) - 1, (1 << 32) - 1)
ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
TEXTS = (
    "decode image: ",
    "image aspect ratio ",
    "image ",
    "invalid image size ",
    "input length (",
    "qwen3.5 does not support ",
    "gemma4 does not support ",
    "glimmer does not support ",
    "nemotron_h does not support ",
)
"""How refusals begin."""


def spliced(form: str, chance: random.Random) -> Iterator[bytes]:
    """Headers of one format in front of another's pixels, and of another picture of the same format."""
    others = [pictures(other) for other in ("png", "jpeg", "gif", "webp", "bmp", "avif")]
    for own in pictures(form):
        for other in others:
            cut = chance.choice((4, 8, 12, 26, 64, len(own) // 2))
            yield own[:cut] + chance.choice(other)[cut:]
            yield chance.choice(other) + own
            yield own[:cut] + own


def lying(form: str, chance: random.Random, count: int) -> Iterator[bytes]:
    """Numbers near the beginning, where sizes are, become others that decoders may stumble over."""
    for _ in range(count):
        data = bytearray(chance.choice(pictures(form)))
        width, order = chance.choice((2, 3, 4)), chance.choice(ORDERS)
        place = chance.randrange(2, min(len(data), 200))
        data[place : place + width] = (chance.choice(SIZES) % (1 << 8 * width)).to_bytes(width, order)
        yield bytes(data)


def body(data: bytes, chance: random.Random) -> bytes:
    """A request with a picture, whose kind its host may not know."""
    item = {"id": 0, "data": b64encode(data).decode(), "Kind": chance.choice(("image", "image", ""))}
    return json.dumps({"Prompt": "see [img-0] and [img-0]", "Media": [item]}).encode()


def read(sent: bytes) -> CompletionRequest:
    reader = CompletionReader(1 << 20, len(sent))
    for start in range(0, len(sent), 8192):
        reader.feed(sent[start : start + 8192])
    return reader.finish()


def outcome(sent: bytes, tokenizer: Tokenizer, support: PictureSupport) -> str:
    """Takes a request as far as the queue. Returns "taken", or how it was refused; anything else is an exception."""
    wire = read(sent)
    try:
        request = prepare(wire, tokenizer, Limits(CONTEXT, 300), checked_format(wire, support), support)
    except RequestError as error:
        return str(error) if error.status == 400 else f"status {error.status}: {error}"
    assert request.pictures is not None
    assert len(request.prompt) == len(request.keys) < CONTEXT
    for span in request.pictures.spans:
        try:
            support.pixels.check(span.picture, bool).result(60)
        except MediaError as error:
            return str(error)
        geometry = span.picture.geometry
        assert len(support.pixels.rows(span.picture, bool).result(60)) == geometry.rows * geometry.columns
        support.pixels.drop(span.picture)
    assert support.pixels.held_bytes == 0
    return "taken"


def main(form: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    files = json.dumps(byte_level()).encode()
    tokenizer = open_tokenizer({"tokenizer.json": files, "config.json": b"{}"}.get)
    supports = [
        PictureSupport(each, 257, 258, 259, PictureNames(), PixelStore(each, decoder=Here())) for each in FAMILIES
    ]
    found: Counter[str] = Counter()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for data in (*spliced(form, chance), *lying(form, chance, count), *cases(form, count, chance)):
        text = outcome(body(data, chance), tokenizer, chance.choice(supports))
        assert text == "taken" or text.startswith(TEXTS), text
        found["taken" if text == "taken" else "refused"] += 1
    sys.stdout.write(f"{form}: {found['taken']} taken, {found['refused']} refused\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
