"""A tokenizer as llguidance sees it: the bytes of every token, those that are no text, and how text is cut."""

from collections.abc import Iterator
from functools import cached_property
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

from runner.tokenizer import Tokenizer

_MOST_BYTES: Final = 1000  # of a token; llguidance takes 24 more, and such tokens spell no text of a grammar
_END: Final = b"<end>"
_BEFORE: Final = "\n"  # some tokenizers set a space in front of a text, which none has in the middle of an answer


def special_tokens(tokenizer: Tokenizer, size: int) -> dict[str, int]:
    """The tokens that are no text, by their names, without those that end an answer."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special - tokenizer.eos) if token < size}


def make_vocabulary(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    """The first `size` tokens of `tokenizer`. Takes a second for a vocabulary of 100,000.

    A model without a token that ends an answer gets one that it cannot draw: it ends where its grammar does.
    """
    view = _View(tokenizer, size)
    return LLTokenizer(TokenizerWrapper(view), n_vocab=len(view.tokens), eos_token=view.ends)


class _View:
    """What llguidance asks of a tokenizer. Nothing here may raise: it would be a panic in Rust."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        spelled = map(tokenizer.token_bytes, range(size))
        self.tokens = [data if len(data) <= _MOST_BYTES else b"" for data in spelled]
        self.ends = sorted(token for token in tokenizer.eos if token < size)
        if not self.ends:
            self.ends = [size]
            self.tokens.append(_END)
        self.eos_token_id = self.ends[0]
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted({*self.ends, *(token for token in tokenizer.special if token < size)})
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text that stands in the middle of another one."""
        whole = text.decode(errors="replace")
        for before in ("", _BEFORE):
            ids = self._tokenizer.encode(before + whole)
            ids = ids[len(self._tokenizer.encode(before)) :] if before else ids
            if self._special.isdisjoint(ids) and b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return [*self._longest(text)]

    def _longest(self, text: bytes) -> Iterator[int]:
        """The longest token at each place; what none spells is left out. For texts that spell special tokens, say."""
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._most_bytes), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is not None:
                yield self._ids[text[at:end]]
            at = end or at + 1

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        ids = {data: token for token, data in reversed([*enumerate(self.tokens)]) if token not in self._special}
        return {data: token for data, token in ids.items() if data}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._ids), default=0)
