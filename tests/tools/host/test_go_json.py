"""Requests and answers as a host's Go code writes and reads them (docs/internals/wire.md, 2.2, 2.4, 6)."""

import json
import math

import pytest

from scripts.tools.host.lib import (
    F_PRIME,
    F_SECOND,
    G_PRIME,
    GENERATIONS,
    A,
    F,
    G,
    Medium,
    Request,
    UndecodableError,
    wire_format,
)
from scripts.tools.host.lib.answers import decode_answer, decode_ids, decode_status
from scripts.tools.host.lib.golang import LONGEST_S, keep_alive_s, utf8_text, valid_text
from scripts.tools.host.lib.requests import encode, go_float32


def test_default_options_are_the_bytes_that_the_host_sends() -> None:
    body = encode(Request("hi <a>&", F.default_options), F)
    assert body == (
        rb'{"Prompt":"hi \u003ca\u003e\u0026","Media":null,"Options":{"num_ctx":4096,"num_batch":512,"num_gpu":-1,'
        rb'"num_keep":4,"seed":-1,"num_predict":-1,"top_k":40,"top_p":0.9,"typical_p":1,"repeat_last_n":64,'
        rb'"temperature":0.8,"repeat_penalty":1},"Logprobs":false,"TopLogprobs":0}'
    )


def test_zeros_are_omitted() -> None:
    zeros = dict.fromkeys(("temperature", "seed", "top_k", "top_p", "repeat_last_n", "num_predict"), 0)
    body = encode(Request("x", {**F.default_options, **zeros}, True, 3, media=[]), F)
    assert body == (
        b'{"Prompt":"x","Media":[],"Options":{"num_ctx":4096,"num_batch":512,"num_gpu":-1,"num_keep":4,"typical_p":1,'
        b'"repeat_penalty":1},"Logprobs":true,"TopLogprobs":3}'
    )


def test_media_carry_the_mixed_case_keys() -> None:
    media = json.loads(encode(Request("x", media=[Medium(b"\x01\x02", "audio")]), F))["Media"]
    assert media == [{"data": "AQI=", "id": 0, "Kind": "audio"}]


def test_floats_are_the_shortest_float32() -> None:
    values = (0.9, 1.0, 1e-7, 1e-6, 0.1 + 0.2, 1e21, 123456.7, -2.5, 16777216.0)
    texts = "0.9 1 1e-7 0.000001 0.3 1e+21 123456.7 -2.5 16777216"
    assert " ".join(map(go_float32, values)) == texts


SCHEMA = {"type": "object", "properties": {}}
TAG = {"type": "json_schema", "json_schema": SCHEMA}


def test_a_format_travels_raw_or_in_a_structural_tag() -> None:
    assert wire_format("json", F) is None
    assert wire_format(SCHEMA, F_PRIME) is SCHEMA
    assert wire_format("json", F_PRIME) == "json"
    for generation in (F_SECOND, G_PRIME, G):
        assert wire_format(SCHEMA, generation) == {"type": "structural_tag", "format": TAG}
        assert wire_format("json", generation) == {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": {"type": "object"}},
        }
        assert wire_format(None, generation) is wire_format("", generation) is None


def test_behind_thinking_the_newest_generation_alone_lets_free_text_come_first() -> None:
    assert wire_format(SCHEMA, G_PRIME, ["</think>"]) == {"type": "structural_tag", "format": TAG}
    one, two = ({"type": "const_string", "value": value} for value in ("</think>", "</thought>"))
    for closings, closing in (
        (["</think>"], one),
        (["</think>", "</thought>"], {"type": "or", "elements": [one, two]}),
    ):
        assert wire_format(SCHEMA, G, closings) == {
            "type": "structural_tag",
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "any_text", "excludes": closings},
                    {"type": "optional", "content": {"type": "sequence", "elements": [closing, TAG]}},
                ],
            },
        }


SUPERSET = (
    b'{"Content":"x","Done":true,"DoneReason":1,"done_reason":1,"PromptEvalCount":7,"prompt_eval_count":7,'
    b'"PromptEvalDuration":11,"prompt_eval_duration":11,"EvalCount":9,"eval_count":9,"EvalDuration":13,'
    b'"eval_duration":13,"Logprobs":null,"Error":null,"PromptEvalCachedCount":3}'
)


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: generation.letter)
def test_the_superset_reads_the_same_in_every_generation(generation: object) -> None:
    answer = decode_answer(SUPERSET, generation)  # type: ignore[arg-type]  # pytest's ids lambda loses the type
    assert answer is not None
    assert (answer.content, answer.done, answer.done_reason) == ("x", True, 1)
    assert (answer.prompt_eval_count, answer.prompt_eval_duration) == (7, 11)
    assert (answer.eval_count, answer.eval_duration) == (9, 13)
    assert answer.prompt_eval_cached_count == (3 if generation in GENERATIONS[-4:] else None)


def test_case_is_folded_but_underscores_count_and_text_is_made_valid() -> None:
    camel = decode_answer(b'{"content":"x","CONTENT":"a\\ud800b\xe2\x82A","prompt_eval_count":7}', F)
    assert camel is not None
    assert (camel.content, camel.prompt_eval_count) == ("a\ufffdb\ufffd\ufffdA", 0)
    snake = decode_answer(b'{"Content":"x","PromptEvalCount":7}', A)
    assert snake is not None
    assert (snake.content, snake.prompt_eval_count) == ("x", 0)


def test_status_and_ids() -> None:
    assert decode_status(b'{"status":0,"Progress":100,"ContextLength":64}') == (0, 100, 64, 0)
    for body in (b'{"Memory":-1}', b'{"Memory":1.0}', b"ok", b"[]"):
        with pytest.raises(UndecodableError):
            decode_status(body)
    assert decode_ids(b"[1,2]\n") == [1, 2]
    assert decode_ids(b"null") == []
    for body in (b"[1.5]", b'{"tokens":[]}', b"404 page not found"):
        with pytest.raises(UndecodableError):
            decode_ids(body)


def test_keep_alive_is_seconds_or_a_duration_and_negative_is_for_ever() -> None:
    assert [keep_alive_s(value) for value in (0, 1.5, "10m", -1, "-1s")] == [0, 1.5, 600, math.inf, math.inf]
    assert [keep_alive_s(value) for value in (1e12, "2562047h")] == [LONGEST_S, 2562047 * 3600]
    for value in (True, None, ["5m"]):
        with pytest.raises(ValueError, match="Unsupported type"):
            keep_alive_s(value)


def test_what_is_no_unicode_becomes_the_replacement_character() -> None:
    assert utf8_text("é".encode() + b"\xff\xed\xa0\x80") == "é" + "\ufffd" * 4
    assert valid_text("\ufeffé\ud83d\ude00 \ud800 \udc00\ud800") == "\ufeffé\U0001f600 \ufffd \ufffd\ufffd"
