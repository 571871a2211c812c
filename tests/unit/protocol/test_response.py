"""One line serves the hosts of every generation, and none is too long for them."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import (
    LINE_LIMIT_BYTES,
    DoneReason,
    Logprob,
    Metrics,
    TopLogprob,
    content_lines,
    error_line,
    final_line,
)

METRICS = Metrics(
    prompt_eval_count=7, prompt_eval_cached_count=5, prompt_eval_duration=11, eval_count=9, eval_duration=13
)


def test_an_entry_that_no_line_can_hold_is_left_out_and_its_text_is_not() -> None:
    entry = Logprob("x" * LINE_LIMIT_BYTES, -1.0)
    for text in ("", "a", "abc"):
        lines = [json.loads(line) for line in content_lines(text, [entry])]
        assert "".join(line["Content"] for line in lines) == text
        assert not any("Logprobs" in line for line in lines)


def test_the_final_line_has_every_counter_in_both_spellings() -> None:
    line = final_line(DoneReason.LENGTH, METRICS)
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "Content": "",
        "Done": True,
        "DoneReason": 1,
        "done_reason": 1,
        "PromptEvalCount": 7,
        "prompt_eval_count": 7,
        "PromptEvalCachedCount": 5,
        "PromptEvalDuration": 11,
        "prompt_eval_duration": 11,
        "EvalCount": 9,
        "eval_count": 9,
        "EvalDuration": 13,
        "eval_duration": 13,
        "Logprobs": None,
        "Error": None,
    }


def test_no_two_keys_of_a_line_differ_only_in_case() -> None:
    for line in (final_line(DoneReason.STOP, METRICS), *content_lines("x", [], METRICS), error_line("x")):
        keys = [key.lower() for key in json.loads(line)]
        assert len(keys) == len(set(keys))


def test_a_content_line_has_logprobs_only_where_they_are() -> None:
    assert content_lines("é", []) == ['{"Content":"é","Done":false}\n'.encode()]
    [line] = content_lines("a", [Logprob("a", -0.5, [TopLogprob("a", -0.5)]), Logprob("b", -1.0)])
    assert json.loads(line)["Logprobs"] == [
        {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]},
        {"token": "b", "logprob": -1.0},
    ]


def test_metered_lines_carry_the_counters_so_far() -> None:
    [line] = content_lines("a", [], METRICS)
    assert json.loads(line).items() >= {"PromptEvalCachedCount": 5, "EvalCount": 9, "Done": False}.items()


def test_a_line_uses_the_room_there_is_and_no_more() -> None:
    room = LINE_LIMIT_BYTES - 1 - len(content_lines("", [])[0])
    assert [len(line) for line in content_lines("x" * room, [])] == [LINE_LIMIT_BYTES - 1]
    assert len(content_lines("x" * (room + 1), [])) == 2


def test_an_error_too_long_for_a_line_is_cut() -> None:
    assert len(error_line("é" * LINE_LIMIT_BYTES)) < LINE_LIMIT_BYTES


@settings(max_examples=30)
@given(
    st.text(alphabet=st.sampled_from('a\x01é😀\n"'), max_size=3).flatmap(lambda s: st.just(s * 20_000)),
    st.integers(0, 400),
)
def test_long_content_is_split_and_nothing_is_lost(text: str, entries: int) -> None:
    logprobs = [Logprob(f"t{i}", -1.0, [TopLogprob("x" * 40, -1.0)] * 20) for i in range(entries)]
    lines = content_lines(text, logprobs)
    assert all(len(line) < LINE_LIMIT_BYTES and line.count(b"\n") == 1 for line in lines)
    decoded = [json.loads(line) for line in lines]
    assert "".join(part["Content"] for part in decoded) == text
    assert [entry["token"] for part in decoded for entry in part.get("Logprobs", ())] == [e.token for e in logprobs]
