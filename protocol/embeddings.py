"""`POST /v1/embeddings`: one text in, one vector out."""

import re
from binascii import a2b_base64
from collections.abc import Sequence

import msgspec

from protocol.golang import Int64, decode
from protocol.refusal import BadRequestError

_LETTERS = re.compile(r"[A-Za-z0-9+/]*")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request."""

    content: str = ""
    dimensions: Int64 = 0
    """The size to which the embedding is cut; 0 or less for its full size."""
    media: list[str] = []
    """In base64."""


class _Embedding(msgspec.Struct, frozen=True):
    embedding: Sequence[float]
    prompt_eval_count: int


def decode_embeddings(body: bytes) -> EmbeddingsRequest:
    """Returns the request in a body, decoded with Go's tolerance. Raises BadRequestError."""
    return decode(body, EmbeddingsRequest)


def decode_media(index: int, coded: str) -> bytes:
    """Returns the bytes of a medium. Raises BadRequestError in Go's words, with a hint for a data URL."""
    text = coded.replace("\r", "").replace("\n", "")
    if _BASE64.fullmatch(text) is None:
        letters = _LETTERS.match(text)
        at = letters.end() if letters is not None else 0
        url = ': of a data URL send only what follows "base64,"' if text.startswith("data:") else ""
        raise BadRequestError(f"media[{index}]: illegal base64 data at input byte {at}{url}")
    return a2b_base64(text)


def sniffed_kind(data: bytes) -> str:
    """Returns `image` or `audio` by the first bytes, as Ollama's runner does; an empty text for other data."""
    container = data[8:12] if data[:4] == b"RIFF" else b""
    if data[:4] == b"\x89PNG" or (data[:2] == b"\xff\xd8" and len(data) >= 4) or data[:4] == b"GIF8":
        return "image"
    if container == b"WEBP":
        return "image"
    return "audio" if container == b"WAVE" or data[:4] == b"OggS" else ""


def embedding_body(embedding: Sequence[float], tokens: int) -> bytes:
    """Returns the answer. `tokens` includes those that begin and end the text."""
    return msgspec.json.encode(_Embedding(embedding, tokens)) + b"\n"
