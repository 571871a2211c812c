"""A body given to the reader in pieces, as a connection would."""

from protocol import CompletionReader, CompletionRequest

PIECE_BYTES = 1 << 16


def read_completion(
    body: bytes, piece_bytes: int = PIECE_BYTES, most_prompt_bytes: int = 1 << 30
) -> tuple[CompletionReader, CompletionRequest]:
    """The reader, which is done, and the request in `body`. Raises what the reader raises."""
    reader = CompletionReader(most_prompt_bytes)
    for start in range(0, len(body), piece_bytes):
        reader.feed(body[start : start + piece_bytes])
    return reader, reader.finish()


def decode_completion(
    body: bytes, piece_bytes: int = PIECE_BYTES, most_prompt_bytes: int = 1 << 30
) -> CompletionRequest:
    """The request in `body`. Raises what the reader raises."""
    return read_completion(body, piece_bytes, most_prompt_bytes)[1]
