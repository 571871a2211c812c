"""Clef: a request has one text of many segments, with all questions and options. One forward scores all options."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import mlx.core as mx

from protocol.score import MOST_ROWS, DecisionRequest, Field, Span, decode_decision
from runner.embeddings.decisions.decider import Decision
from runner.embeddings.embedder import EncoderPiece, TextToEmbed
from runner.errors import RequestError
from runner.tokenizer import Tokenizer

_TYPES = 3
_LEAST_OPTIONS, _MOST_OPTIONS = 2, 26
_LEAST_SEGMENTS, _FIRST = 3, 2
"""The least number of segments, and the index of the first segment that can belong to a question or an option."""
_MOST_SEGMENTS = 1 << 13
_TOGETHER = 64
"""The number of segments that are tokenized before other requests have a turn."""


class Spans(NamedTuple):
    """The questions about a text. A span is the [start, stop) of tokens."""

    questions: Sequence[Span]
    options: Sequence[Span]
    """The options of the first question, then of the second, and so on."""
    types: Sequence[int]
    counts: Sequence[int]
    """The number of options of each question."""


class Clef:
    """A Clef model as a `Decider` and a `TextEncoder`."""

    counts_cached = True
    together = False
    warm = TextToEmbed([0, 0], asked=Spans([(0, 1)], [(0, 1), (1, 2)], [0], [2]))

    def __init__(self, module: Any, context_length: int, chunk_tokens: int) -> None:
        self._module = module
        self._most = context_length
        self._chunk = chunk_tokens

    @property
    def layers(self) -> Sequence[object]:
        return cast("Sequence[object]", self._module.language_model.layers)

    @property
    def token_bytes(self) -> int:
        """The bytes of memory that a forward needs for each token: keys, values, hidden states, the head's states."""
        text, width = self._module.config.text_config, int(self._module.config.head_config["width"])
        keys = 2 * int(text.num_key_value_heads) * int(text.head_dim or text.hidden_size // text.num_attention_heads)
        layers = keys * int(text.num_hidden_layers) + 3 * int(text.hidden_size)
        return 4 * (layers + MOST_ROWS * _MOST_OPTIONS + 4 * width)

    def read_body(self, body: bytes, tokenizer: Tokenizer) -> Iterator[Decision | None]:
        """Yields None where others may have a turn, then the one text. Raises RequestError and BadRequestError."""
        wanted = decode_decision(body)
        if wanted.images:
            raise RequestError("pictures are not served for Clef: send the state as text")
        segments, fields = len(wanted.segments), len(wanted.fields)
        fits = _LEAST_SEGMENTS <= segments <= _MOST_SEGMENTS and 1 <= fields <= MOST_ROWS
        if not fits or not 1 <= wanted.max_tokens <= self._most:
            raise RequestError("invalid Clef question count or context limit")
        for each in wanted.fields:
            _check(each, segments)
        parts, count = list[list[int]](), 0
        for number, segment in enumerate(wanted.segments):
            parts.append((yield from tokenizer.encode_within(segment, wanted.max_tokens)))
            count += len(parts[-1])
            _refuse_long(count, wanted)
            if number % _TOGETHER == 0:
                yield None
        ends = [0, *accumulate(map(len, parts))]
        ids = [token for part in parts for token in part]
        rows = self._module.language_model.lm_head.weight.shape[0]
        if max(ids, default=0) >= rows:
            raise RequestError(f"the model has no token {max(ids)}: its vocabulary has {rows}")
        spans = Spans(
            [_tokens(each.question, ends) for each in wanted.fields],
            [_tokens(option, ends) for each in wanted.fields for option in each.options],
            [each.type for each in wanted.fields],
            [len(each.options) for each in wanted.fields],
        )
        yield Decision(TextToEmbed(ids, asked=spans), spans.counts)

    def encode(self, inputs: mx.array, lengths: Sequence[int], asked: Sequence[Spans]) -> Iterator[EncoderPiece]:
        """Builds a forward over one text [1, L]. Yields a piece for each chunk, then the scores [1, options]."""
        del lengths
        (spans,) = asked
        language, length = self._module.language_model, inputs.shape[1]
        layers = self._module.make_cache()
        hidden = []
        for start in range(0, length, self._chunk):
            tokens = inputs[:, start : start + self._chunk]
            positions = self._module.plain_positions(tokens.shape[1], layers)
            hidden.append(language.model(tokens, cache=layers, position_ids=positions))
            yield EncoderPiece([hidden[-1]], tokens.size * len(language.layers))
        states = self._module.head.hidden_norm(mx.concatenate(hidden, axis=1)[0])
        words = _means(spans.options, length) @ _rows(language.lm_head, inputs[0])
        types = mx.array([*spans.types])
        scores = self._module.head(
            states, spans.questions, spans.options, words.astype(states.dtype), types, spans.counts
        )
        yield EncoderPiece([scores.astype(mx.float32)[None]], 0.0)


def _check(field: Field, segments: int) -> None:
    if not 0 <= field.type < _TYPES or not _LEAST_OPTIONS <= len(field.options) <= _MOST_OPTIONS:
        raise RequestError("invalid Clef question type or option count")
    for start, stop in (field.question, *field.options):
        if not _FIRST <= start < stop <= segments:
            raise RequestError("Clef question span is outside the schema")


def _tokens(span: Span, ends: Sequence[int]) -> Span:
    """Returns a span of segments as a span of tokens. `ends` are 0 and the segments' ends. Raises RequestError."""
    start, stop = ends[span[0]], ends[span[1]]
    if start == stop:
        raise RequestError("Clef question span has no tokens")
    return start, stop


def _refuse_long(count: int, wanted: DecisionRequest) -> None:
    if count > wanted.max_tokens:
        raise RequestError(f"Clef input has {count} tokens; context limit is {wanted.max_tokens}")


def _means(spans: Sequence[Span], length: int) -> mx.array:
    """Returns weights [spans, length]. Their product with rows [length, D] is the mean row of each span."""
    at = mx.arange(length)
    starts, stops = (mx.array(each)[:, None] for each in zip(*spans, strict=True))
    return ((at >= starts) & (at < stops)) / (stops - starts)


def _rows(head: Any, tokens: mx.array) -> mx.array:
    """Returns the rows [L, D] of an output layer for these tokens, unpacked if the layer is packed."""
    rows: mx.array = head.weight[tokens]
    if "scales" not in head:
        return rows
    biases = head.biases[tokens] if "biases" in head else None
    return mx.dequantize(rows, head.scales[tokens], biases, head.group_size, head.bits, mode=head.mode)
