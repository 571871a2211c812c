"""The tokenizer in the form that llguidance needs: the bytes of every token, the special tokens, and `encode`."""

from collections.abc import Iterator
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from runner.tokenizer import Tokenizer

_MOST_BYTES = 1000  # the longest token; llguidance allows 24 more, and grammars have no use for longer ones
_END = b"<end>"
_BEFORE = "\n"  # some tokenizers put a space before a text, which is wrong in the middle of an answer


def special_tokens(tokenizer: Tokenizer, size: int) -> dict[str, int]:
    """Returns the ids of the special tokens by their text, without those that end an answer."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special - tokenizer.eos) if token < size}


def make_vocabulary(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    """Returns the first `size` tokens of `tokenizer` as a vocabulary. Takes a second for 100,000 tokens.

    A model without an end token gets one that it cannot draw; its answers end where their grammar does.
    """
    view = _TokenizerView(tokenizer, size)
    return LLTokenizer(TokenizerWrapper(view), n_vocab=len(view.tokens), eos_token=view.ends)


class _TokenizerView:
    """The tokenizer interface that llguidance calls. Nothing here may raise: that would be a panic in Rust."""

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
        """Returns the tokens of a text in the middle of an answer."""
        whole = text.decode(errors="replace")
        for before in ("", _BEFORE):
            ids = self._tokenizer.encode(before + whole)
            ids = ids[len(self._tokenizer.encode(before)) :] if before else ids
            if self._special.isdisjoint(ids) and b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return [*self._longest(text)]

    def _longest(self, text: bytes) -> Iterator[int]:
        """Yields the longest token at each position and skips bytes that no token spells."""
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
