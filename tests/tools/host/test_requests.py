"""Request bodies, byte for byte as observed with the host's real client (docs/internals/wire.md, 2.2)."""

import json

import pytest

from scripts.tools.host.lib import (
    F_PRIME,
    F_SECOND,
    G_PRIME,
    GENERATIONS,
    A,
    C,
    D,
    E,
    F,
    G,
    Medium,
    Request,
    wire_format,
)
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


def test_early_hosts_send_lower_case_keys_and_only_the_options_they_know() -> None:
    options = {**F.default_options, "presence_penalty": 1.5, "frequency_penalty": 0.5, "stop": ["x"], "seed": 7}
    assert json.loads(encode(Request("x", options), A)) == {
        "prompt": "x",
        "options": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "num_predict": -1},
    }
    late = json.loads(encode(Request("x", options), C))["options"]
    assert late["repeat_last_n"] == 64
    assert late["presence_penalty"] == 1.5
    assert "repeat_penalty" not in late
    assert json.loads(encode(Request("x", options), D))["options"]["frequency_penalty"] == 0.5
    assert encode(Request("x", None), A) == b'{"prompt":"x"}'
    assert json.loads(encode(Request("x", None), E)) == {
        "Prompt": "x",
        "Options": None,
        "Logprobs": False,
        "TopLogprobs": 0,
    }


def test_media_carry_the_mixed_case_keys() -> None:
    media = json.loads(encode(Request("x", media=[Medium(b"\x01\x02", "audio")]), F))["Media"]
    assert media == [{"data": "AQI=", "id": 0, "Kind": "audio"}]


def test_generation_g_always_sends_its_two_keys() -> None:
    body = json.loads(encode(Request("x"), G))
    assert body["Format"] is None
    assert body["IncludeIntermediateMetrics"] is False


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9, "0.9"),
        (1.0, "1"),
        (1e-7, "1e-7"),
        (1e-6, "0.000001"),
        (0.1 + 0.2, "0.3"),
        (1e21, "1e+21"),
        (123456.7, "123456.7"),
        (-2.5, "-2.5"),
        (16777216.0, "16777216"),
    ],
)
def test_floats_are_the_shortest_float32(value: float, text: str) -> None:
    assert go_float32(value) == text


def test_every_generation_encodes_to_json() -> None:
    for generation in GENERATIONS:
        body = json.loads(encode(Request('a"\u2028\n\x01é', generation.default_options), generation))
        assert body[generation.request_keys[0]] == 'a"\u2028\n\x01é'


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
