"""Laya: a text for each question, with a [MASK] as a mark before each option. The output at a mark is scored.

[CLS] TYPE question: INSTRUCTIONS [SEP] [MASK] OPTION ... [SEP] STATE [SEP]
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.score import MOST_ROWS, DecisionRequest, Question, decode_decision
from runner.embeddings.decisions.decider import Decision
from runner.embeddings.embedder import EncoderPiece, TextToEmbed
from runner.errors import ModelError, RequestError
from runner.tokenizer import Tokenizer

_TYPES = ("choice", "score", "noul")
_MOST_OPTION_TOKENS = 48
_LEAST_QUESTION, _LEAST_OPTION, _SHORTEST_QUESTION = 16, 4, 8
"""Numbers of tokens. If less room than _LEAST_QUESTION is left for a question, its options are cut, but not below
_LEAST_OPTION. The question then keeps at least _SHORTEST_QUESTION."""
_MOST_OPTIONS = 255
_HIDDEN = -1e9
_COLDEST, _WARMEST = 0.5, 5.0
_BUCKETS = ((2, "2"), (5, "3-5"), (10, "6-10"), (_MOST_OPTIONS, "11+"))
"""The most options of a bucket, and the bucket's name in the keys of `temperature_by_options`."""


class Marks(NamedTuple):
    """The question in a text."""

    places: Sequence[int]
    """The positions of the options' marks."""
    type: int
    temperature: float


class Laya:
    """A Laya model as a `Decider` and a `TextEncoder`."""

    counts_cached = False
    together = True
    warm = TextToEmbed([0, 0], asked=Marks((1,), 0, 1.0))

    def __init__(self, module: Any, tokenizer: Tokenizer) -> None:
        """Raises ModelError if `[CLS]`, `[SEP]` or `[MASK]` is not one token."""
        self._module = module
        self._vocabulary = module.encoder.embeddings.tok_embeddings.weight.shape[0]
        self._wanted: Mapping[str, Any] = module.config.decision_config
        self._most, self._most_head = int(self._wanted["max_len"]), int(self._wanted["head_max_len"])
        self._begin, self._end, self._mark = (_single(tokenizer, text) for text in ("[CLS]", "[SEP]", "[MASK]"))

    @property
    def layers(self) -> Sequence[object]:
        return [*self._module.encoder.layers, *self._module.head.layers]

    @property
    def token_bytes(self) -> int:
        """The bytes of memory that a forward needs for each token: masks and activations."""
        config = self._module.encoder.config
        return 4 * (2 * self._most + 8 * int(config.hidden_size) + 3 * int(config.intermediate_size))

    def read_body(self, body: bytes, tokenizer: Tokenizer) -> Iterator[Decision | None]:
        """Yields a text for each row of the body. Raises RequestError and BadRequestError."""
        wanted = decode_decision(body)
        if not 1 <= len(wanted.rows) <= MOST_ROWS or not 1 <= wanted.max_tokens <= self._most:
            raise RequestError("invalid Laya row count or context limit")
        questions = [row.question for row in wanted.rows if row.question is not None]
        if len(questions) < len(wanted.rows):
            raise RequestError("Laya requires structured decision inputs")
        state = yield from tokenizer.encode_within(wanted.state.replace("[MASK]", " "), self._most)
        for number, question in enumerate(questions):
            yield self._decision(number, question, state, wanted, tokenizer)

    def _decision(
        self, number: int, question: Question, state: Sequence[int], wanted: DecisionRequest, tokenizer: Tokenizer
    ) -> Decision:
        if question.type not in _TYPES or not 2 <= len(question.options) <= _MOST_OPTIONS:
            raise RequestError(f"question {number}: invalid type or number of options")

        def first(text: str, most: int) -> list[int]:
            text = text[: (most + 1) * tokenizer.longest_bytes]  # has more than `most` tokens, the last perhaps wrong
            return tokenizer.encode_without_bos(text.replace("[MASK]", " "))[:most]

        head = first(f"{question.type} question: {question.instructions}", self._most_head)
        options = [[self._mark, *first(f" {text}", _MOST_OPTION_TOKENS)] for text in question.options]
        room = self._most_head - sum(map(len, options))
        if room < _LEAST_QUESTION:
            each = max(_LEAST_OPTION, (self._most_head - _LEAST_QUESTION) // len(options))
            options = [option[:each] for option in options]
            room = self._most_head - sum(map(len, options))
        ids = [self._begin, *head[: max(_SHORTEST_QUESTION, room)], self._end]
        places = []
        for option in options:
            places.append(len(ids))
            ids += option
        most = min(self._most, wanted.max_tokens)
        if places[-1] >= most:
            raise RequestError(f"question {number}: its options do not fit the context of {most} tokens")
        ids.append(self._end)
        ids = [*ids, *state[: max(0, most - len(ids) - 1)], self._end][:most]
        if max(ids) >= self._vocabulary:
            raise RequestError(f"the model has no token {max(ids)}: its vocabulary has {self._vocabulary} tokens")
        kind = _TYPES.index(question.type)
        asked = Marks(places, kind, self._temperature(question.type, kind, len(options)))
        return Decision(TextToEmbed(ids, asked=asked), [len(options)])

    def _temperature(self, name: str, kind: int, options: int) -> float:
        """Returns the number by which a question's scores are divided."""
        bucket = next(name for most, name in _BUCKETS if options <= most)
        given = (self._wanted.get("temperature_by_options") or {}).get(f"{name}:{bucket}")
        try:
            found = float(self._wanted["temperature"][kind] if given is None else given)
        except (TypeError, ValueError, KeyError, IndexError):
            return 1.0
        return min(_WARMEST, max(_COLDEST, found)) if math.isfinite(found) else 1.0

    def encode(self, inputs: mx.array, lengths: Sequence[int], asked: Sequence[Marks]) -> Iterator[EncoderPiece]:
        """Builds a forward over texts [B, L]. Yields a piece for each layer, then the scores [B, most options]."""
        encoder, head = self._module.encoder, self._module.head
        there = mx.arange(inputs.shape[1]) < mx.array([*lengths])[:, None]
        hidden = encoder.embeddings(inputs)
        masks = encoder._masks(there.astype(mx.int32), hidden.dtype)
        for layer in encoder.layers:
            hidden = layer(hidden, *masks)
            yield EncoderPiece([hidden], inputs.size)
        types = self._module.type_emb(mx.array([each.type for each in asked]))
        hidden = encoder.final_norm(hidden) + types[:, None]
        mask = mx.where(there[:, None, None], 0.0, _HIDDEN).astype(hidden.dtype)
        for layer in head.layers:
            hidden = layer(hidden, mask)
            yield EncoderPiece([hidden], inputs.size)
        most = max(len(each.places) for each in asked)
        places = mx.array([[*each.places, *[0] * (most - len(each.places))] for each in asked])
        scores = self._module.scorer(hidden[mx.arange(len(asked))[:, None], places]).squeeze(-1)
        yield EncoderPiece([scores.astype(mx.float32) / mx.array([each.temperature for each in asked])[:, None]], 0.0)


def _single(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.encode_without_bos(text)
    if len(found) != 1:
        raise ModelError(f"load tokenizer config: {text} is not one token")
    return found[0]
