"""Answers of a simulated model: random walks through a guide, using forced tokens and masks like the engine."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np

from protocol import Format, decode_format
from runner.grammar.compiler import Compiler
from runner.grammar.guide import Guide
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.local_grammar import LocalGrammar

END = "<|end|>"
WORDS = (
    *(b"  ", b" \n", b"\n  ", b"    "),
    *(b'{"', b'": ', b'", "', b", ", b": ", b"}}", b"]]", b'"}', b"[[", b'":', b"{}", b"[]", b'""', b"],", b'["'),
    *(b"ab", b"abc", b"the", b" the", b"name", b"true", b"false", b"null", b"10", b"00", b"-1", b".5", b"e+", b'\\"'),
    *("é".encode(), "日本".encode(), "日".encode()[:2], "😀".encode()[:3], b"\\u", b"\\n", b"</", b"think>", b"ink>x"),
)
"""Tokens in addition to all single bytes."""
_CLOSING = (b'"', b"}", b"]", b",", b":", b" ")
"""Texts that bring a JSON text to its end; the first possible one is taken."""
_EMPTY = {b"{": b"}", b"[": b"]"}
"""An opening -> the text that closes it at once, preferred to all others."""
_OPENING = (b"{", b"[", b"\\")
"""Texts that prolong a JSON text; taken only if nothing else may come."""
_IMPATIENCE = 0.7
"""Below 1, because a mail address could always continue with `}` and never get its `@`."""
_KINDS = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"@.-:/")
"""Kinds of single bytes that a format or pattern may require."""
_MOST_TOKENS = 20_000


def opened(document: object, **files: object) -> Tokenizer:
    """Opens a `tokenizer.json`, or the bytes of a `tokenizer.model`, with `files` beside it as JSON."""
    data = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    if isinstance(document, bytes):
        data["tokenizer.model"] = document
    else:
        data["tokenizer.json"] = json.dumps(document).encode()
    return open_tokenizer(data.get)


@cache
def words_tokenizer() -> Tokenizer:
    """Returns a tokenizer of all bytes, words, special tokens, and one end token."""
    special = ["<think>", "</think>", "<|call|>", END]
    first = len(ALL_BYTES) + len(WORDS)
    return opened(byte_level([*ALL_BYTES, *WORDS], special), generation_config={"eos_token_id": first + 3})


@cache
def bytes_tokenizer() -> Tokenizer:
    """Returns a tokenizer in which id i is byte i, and 256 ends an answer."""
    return opened(byte_level(ALL_BYTES, [END]), generation_config={"eos_token_id": 256})


def format_of(wanted: object) -> Format:
    """Decodes a `Format` that is not empty."""
    found = decode_format(json.dumps(wanted).encode())
    assert found is not None
    return found


@cache
def compiler_of(tokenizer: Tokenizer, vocab_size: int = 0) -> Compiler:
    """Returns a compiler; its vocabulary is built once."""
    return Compiler(tokenizer, vocab_size)


def guide_of(wanted: object, tokenizer: Tokenizer, *, vocab_size: int = 0) -> Guide:
    """Returns a guide for an answer in this `Format`. Raises RequestError, FormatError."""
    return LocalGrammar(compiler_of(tokenizer, vocab_size), format_of(wanted)).own_guide()


def bits(mask: bytes) -> list[int]:
    """Returns the tokens of a mask."""
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return found


class Walk(NamedTuple):
    """An answer, without its end token."""

    tokens: list[int]
    complete: list[int]
    """The lengths at which it could have ended, including its full length."""


Choose = Callable[[list[int], list[int]], int]
"""Chooses the next token: (possible tokens, tokens so far) -> token."""


def walk(
    guide: Guide, tokenizer: Tokenizer, random: Random, choose: Choose, *, jumps: bool = True, most: int | None = None
) -> Walk:
    """Returns an answer up to its end, or its first `most` tokens.

    Takes forced tokens a few at a time if `jumps`, else one by one.
    """
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
    """A model that draws at random and, after `patience` tokens, brings its JSON text to an end."""

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
    """Returns the text of an answer."""
    return b"".join(map(tokenizer.token_bytes, tokens))


def accepts(wanted: object, text: str | bytes) -> bool:
    """Returns True if this is a complete answer."""
    data = text.encode() if isinstance(text, str) else text
    guide = guide_of(wanted, bytes_tokenizer())
    for byte in data:
        if guide.complete or byte not in bits(guide.mask()):
            return False
        guide.take(byte)
    return guide.complete or not bytes_tokenizer().eos.isdisjoint(bits(guide.mask()))
