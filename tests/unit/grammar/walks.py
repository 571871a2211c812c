"""Answers by a made-up model: a random walk through a guide, forced tokens and masks as the engine uses them."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np

from protocol import Format, decode_format
from runner.grammar import Guide
from runner.grammar.compiler import Compiler
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level

END = "<|end|>"
WORDS = (
    *(b"  ", b" \n", b"\n  ", b"    "),
    *(b'{"', b'": ', b'", "', b", ", b": ", b"}}", b"]]", b'"}', b"[[", b'":', b"{}", b"[]", b'""', b"],", b'["'),
    *(b"ab", b"abc", b"the", b" the", b"name", b"true", b"false", b"null", b"10", b"00", b"-1", b".5", b"e+", b'\\"'),
    *("é".encode(), "日本".encode(), "日".encode()[:2], "😀".encode()[:3], b"\\u", b"\\n", b"</", b"think>", b"ink>x"),
)
"""Beside the bytes, which are all there too."""
_CLOSING = (b'"', b"}", b"]", b",", b":", b" ")
"""What brings a JSON text to its end: the first that may come."""
_EMPTY = {b"{": b"}", b"[": b"]"}
"""What does, right behind an opening, before any other."""
_OPENING = (b"{", b"[", b"\\")
"""What does not, unless nothing else may come."""
_IMPATIENCE = 0.7
"""Less than certainty: a mail address would go on with `}` for ever, where it needs an `@`."""
_KINDS = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"@.-:/")
"""Of single bytes, one of which a format or a pattern may wait for."""
_MOST_TOKENS = 20_000


def opened(document: object, **files: object) -> Tokenizer:
    """A tokenizer of this `tokenizer.json`, or of these bytes of a `tokenizer.model`; `files` are beside it, JSON."""
    data = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    if isinstance(document, bytes):
        data["tokenizer.model"] = document
    else:
        data["tokenizer.json"] = json.dumps(document).encode()
    return open_tokenizer(data.get)


@cache
def words_tokenizer() -> Tokenizer:
    """All bytes, words, special tokens, and one that ends an answer."""
    special = ["<think>", "</think>", "<|call|>", END]
    first = len(ALL_BYTES) + len(WORDS)
    return opened(byte_level([*ALL_BYTES, *WORDS], special), generation_config={"eos_token_id": first + 3})


@cache
def bytes_tokenizer() -> Tokenizer:
    """Id i is byte i; 256 ends an answer."""
    return opened(byte_level(ALL_BYTES, [END]), generation_config={"eos_token_id": 256})


def format_of(wanted: object) -> Format:
    """What comes of this `Format`, which asks for something."""
    found = decode_format(json.dumps(wanted).encode())
    assert found is not None
    return found


@cache
def compiler_of(tokenizer: Tokenizer, vocab_size: int = 0) -> Compiler:
    """Whose vocabulary is built once."""
    return Compiler(tokenizer, vocab_size)


def guide_of(wanted: object, tokenizer: Tokenizer, *, vocab_size: int = 0) -> Guide:
    """For an answer in this `Format`. Raises RequestError, FormatError."""
    return compiler_of(tokenizer, vocab_size).compile(format_of(wanted)).guide()


def bits(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return found


class Walk(NamedTuple):
    """An answer, without the token that ended it, if one did."""

    tokens: list[int]
    complete: list[int]
    """After how many tokens it could have ended, the end of the answer included."""


Choose = Callable[[list[int], list[int]], int]
"""The next token, of those that may come; behind these."""


def walk(
    guide: Guide, tokenizer: Tokenizer, random: Random, choose: Choose, *, jumps: bool = True, most: int | None = None
) -> Walk:
    """An answer to its end, or so many tokens of it. What is forced is taken a few at a time if it `jumps`, else one by
    one."""
    tokens: list[int] = []
    complete: list[int] = []
    while len(tokens) < (_MOST_TOKENS if most is None else most):
        if jumps and (forced := guide.forced(random.randrange(5))):
            tokens += forced
            continue
        if guide.complete:
            return Walk(tokens, [*complete, len(tokens)])
        possible = bits(guide.mask())
        ends = tokenizer.eos.intersection(possible)
        if ends:
            complete.append(len(tokens))
        token = choose(possible, tokens)
        if token in ends:
            return Walk(tokens, complete)
        guide.take(token)
        tokens.append(token)
    if most is not None:
        return Walk(tokens, complete)
    raise AssertionError(f"no end: {spelled(tokens, tokenizer)[-200:]!r}")


class Impatient:
    """A model that draws at random, in JSON, and after so many tokens what brings the text to its end."""

    def __init__(self, tokenizer: Tokenizer, random: Random, patience: int = 40) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._patience = patience
        self._eagerness = random.choice((0.05, 0.2, 0.5))

    def __call__(self, possible: list[int], tokens: list[int]) -> int:
        self._patience -= 1
        if self._random.random() < (self._eagerness if self._patience > 0 else _IMPATIENCE):
            empty = _EMPTY.get(self._tokenizer.token_bytes(tokens[-1])[-1:]) if tokens else None
            ranks = [self._rank(token, empty) for token in possible]
            possible = [token for token, rank in zip(possible, ranks, strict=True) if rank == min(ranks)]
        elif self._patience <= 0:
            kind = self._random.choice(_KINDS)
            possible = [token for token in possible if self._tokenizer.token_bytes(token) in kind] or possible
        return self._random.choice(possible)

    def _rank(self, token: int, empty: bytes | None) -> int:
        text = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.eos or text == empty:
            return -1
        if text in _CLOSING:
            return _CLOSING.index(text)
        return len(_CLOSING) + (2 if text in _OPENING else len(text) > 1)


def spelled(tokens: Sequence[int], tokenizer: Tokenizer) -> bytes:
    """The text of an answer."""
    return b"".join(map(tokenizer.token_bytes, tokens))


def accepts(wanted: object, text: str | bytes) -> bool:
    """Whether this is an answer, from end to end."""
    data = text.encode() if isinstance(text, str) else text
    guide = guide_of(wanted, bytes_tokenizer())
    for byte in data:
        if guide.complete or byte not in bits(guide.mask()):
            return False
        guide.take(byte)
    return guide.complete or not bytes_tokenizer().eos.isdisjoint(bits(guide.mask()))
