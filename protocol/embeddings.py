"""`POST /v1/embeddings`: the request has one text with media, the response one vector."""

import re
from binascii import a2b_base64
from collections.abc import Sequence

import msgspec

from protocol.golang import Int64, decode
from protocol.refusal import BadRequestError

_LETTERS = re.compile(r"[A-Za-z0-9+/]*")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an embeddings request. `content` is the text."""

    content: str = ""
    dimensions: Int64 = 0
    """The length to which the vector is cut. A value of 0 or less asks for the full length."""
    media: list[str] = []
    """The files of pictures and sounds, each in base64."""


class _Embedding(msgspec.Struct, frozen=True):
    embedding: Sequence[float]
    prompt_eval_count: int


def decode_embeddings(body: bytes) -> EmbeddingsRequest:
    """Returns the request in a body, decoded as `protocol.golang` does. Raises BadRequestError for an invalid body."""
    return decode(body, EmbeddingsRequest)


def decode_media(index: int, coded: str) -> bytes:
    """Returns the bytes of `media[index]`, given in base64. Raises BadRequestError in Go's words."""
    text = coded.replace("\r", "").replace("\n", "")
    if _BASE64.fullmatch(text) is None:
        letters = _LETTERS.match(text)
        at = letters.end() if letters is not None else 0
        url = ': of a data URL send only what follows "base64,"' if text.startswith("data:") else ""
        raise BadRequestError(f"media[{index}]: illegal base64 data at input byte {at}{url}")
    return a2b_base64(text)


def sniffed_kind(data: bytes) -> str:
    """Returns `image` or `audio`, decided by the first bytes of `data` as in Ollama's runner; "" for other data."""
    container = data[8:12] if data[:4] == b"RIFF" else b""
    if data[:4] == b"\x89PNG" or (data[:2] == b"\xff\xd8" and len(data) >= 4) or data[:4] == b"GIF8":
        return "image"
    if container == b"WEBP":
        return "image"
    return "audio" if container == b"WAVE" or data[:4] == b"OggS" else ""


def embedding_body(embedding: Sequence[float], tokens: int) -> bytes:
    """Returns the body of the response. `tokens` counts also the special tokens before and after the text."""
    return msgspec.json.encode(_Embedding(embedding, tokens)) + b"\n"
