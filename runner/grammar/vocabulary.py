"""Makes llguidance's vocabulary from a tokenizer: the bytes of all tokens, the special tokens, the encoding."""

from collections.abc import Iterator
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from runner.tokenizer import Tokenizer

_MOST_BYTES = 1000  # of a token. llguidance allows 24 more; grammars need no longer tokens
_END = b"<end>"
_BEFORE = "\n"  # some tokenizers put a space before a text, which is wrong in the middle of an answer


def special_tokens(tokenizer: Tokenizer, size: int) -> dict[str, int]:
    """Maps the text of each special token that does not end an answer to its id. Ids are less than `size`."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special - tokenizer.eos) if token < size}


def make_vocabulary(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    """Returns a vocabulary of the first `size` tokens of `tokenizer`. Takes a second for 100,000 tokens.

    A model without a token that ends answers gets one that it cannot draw: an answer ends where its grammar does.
    """
    view = _TokenizerView(tokenizer, size)
    return LLTokenizer(TokenizerWrapper(view), n_vocab=len(view.tokens), eos_token=view.ends)


class _TokenizerView:
    """The tokenizer as llguidance calls it. Its methods must not raise: an error would be a panic in Rust."""

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
        """Returns the tokens of a text that stands in the middle of an answer."""
        whole = text.decode(errors="replace")
        for before in ("", _BEFORE):
            ids = self._tokenizer.encode(before + whole)
            ids = ids[len(self._tokenizer.encode(before)) :] if before else ids
            if self._special.isdisjoint(ids) and b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return [*self._longest(text)]

    def _longest(self, text: bytes) -> Iterator[int]:
        """Yields the longest token that matches at each position. Skips bytes with which no token begins."""
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
