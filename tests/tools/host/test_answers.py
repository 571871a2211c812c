"""Lines are decoded, or dropped, as a host's Go decoder does it (docs/internals/wire.md, 2.4, 6)."""

import json

import pytest

from scripts.tools.host.lib import GENERATIONS, A, B, E, F, Logprob, TokenLogprob, UndecodableError
from scripts.tools.host.lib.answers import decode_answer, decode_ids, decode_status

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
    assert answer.prompt_eval_cached_count == (3 if generation in GENERATIONS[-3:] else None)


def test_case_is_folded_but_underscores_count() -> None:
    camel = decode_answer(b'{"CONTENT":"x","prompt_eval_count":7}', F)
    assert camel is not None
    assert (camel.content, camel.prompt_eval_count) == ("x", 0)
    snake = decode_answer(b'{"Content":"x","PromptEvalCount":7}', A)
    assert snake is not None
    assert (snake.content, snake.prompt_eval_count) == ("x", 0)


def test_the_last_duplicate_wins() -> None:
    answer = decode_answer(b'{"Content":"a","content":"b"}', F)
    assert answer is not None
    assert answer.content == "b"


@pytest.mark.parametrize(
    "line",
    [
        b'{"EvalCount":1.5}',
        b'{"EvalCount":1e9}',
        b'{"EvalCount":"3"}',
        b'{"EvalCount":NaN}',
        b'{"EvalCount":true}',
        b'{"EvalCount":9223372036854775808}',
        b'{"Content":3}',
        b'{"Done":1}',
        b'{"Error":"text"}',
        b'{"error":"text"}',
        b'{"Logprobs":[{"token":"x","logprob":-Infinity}]}',
        b'{"Logprobs":{}}',
        b"[]",
        b"{",
        b"",
    ],
)
def test_a_line_with_one_wrong_type_is_dropped(line: bytes) -> None:
    assert decode_answer(line, F) is None


def test_what_a_generation_does_not_read_cannot_hurt_it() -> None:
    assert decode_answer(b'{"content":"x","Error":"text","Logprobs":3}', A) is not None
    assert decode_answer(b'{"Content":"x","Logprobs":3}', B) is not None


def test_logprobs_and_errors() -> None:
    entry = {"token": "x", "logprob": -0.5, "top_logprobs": [{"token": "y", "logprob": -1}]}
    line = json.dumps({"Logprobs": [entry], "Error": {"StatusCode": 500, "Status": "", "error": "boom"}})
    answer = decode_answer(line.encode(), E)
    assert answer is not None
    assert answer.logprobs == (Logprob("x", -0.5, (TokenLogprob("y", -1.0),)),)
    assert answer.error is not None
    assert (answer.error.status_code, answer.error.text) == (500, "boom")


def test_lone_surrogates_become_replacement_characters() -> None:
    answer = decode_answer(b'{"Content":"a\\ud800b\\ud83d\\ude00"}', F)
    assert answer is not None
    assert answer.content == "a\ufffdb😀"


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


def test_of_a_status_and_of_ids_only_the_first_value_counts_and_of_a_line_nothing_may_follow() -> None:
    assert decode_status(b' {"Memory":7} trailing').memory == 7
    assert decode_ids(b"[1,2]}") == [1, 2]
    assert decode_answer(b'{"Content":"x"} ', F) is not None
    assert decode_answer(b'{"Content":"x"}}', F) is None


def test_each_invalid_byte_is_one_replacement_character() -> None:
    answer = decode_answer(b'{"Content":"\xe2\x82A\xf0\x9f\x98"}', F)
    assert answer is not None
    assert answer.content == "\ufffd\ufffdA\ufffd\ufffd\ufffd"


def test_a_number_of_any_length_is_no_fault_of_ours() -> None:
    assert decode_answer(b'{"EvalCount":' + b"9" * 5000 + b"}", F) is None
