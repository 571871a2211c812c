"""`/v1/systemone` by its parts: which questions are read, what the model is told, what its logits become."""

import json
import math

import pytest

from scripts.tools.host.decisions import Question, contents, read_questions

URGENT = {"type": "noul", "instructions": "Is it urgent?", "criteria": {"false": "it can wait", "true": "now"}}
TEAM = {"type": "choice", "instructions": "Whose is it?", "criteria": {"sales": "prices", "billing": "invoices"}}
ANGER = {"type": "score", "instructions": "How angry?", "criteria": ["calm", "cross", "furious"]}
LOGITS = [math.log(0.5), math.log(0.25), math.log(0.25)]


def test_options_are_in_the_order_of_hosts() -> None:
    urgent, team, anger = read_questions({"questions": {"urgent": URGENT, "team": TEAM, "anger": ANGER}})
    assert urgent.options == [("true", "now"), ("false", "it can wait")]
    assert team.options == [("billing", "invoices"), ("sales", "prices")]
    assert anger.options == [("0", "calm"), ("1", "cross"), ("2", "furious")]
    assert anger.schema["choices"] == [
        {"code": code, "value": value, "description": text}
        for code, value, text in (("A", "0", "calm"), ("B", "1", "cross"), ("C", "2", "furious"))
    ]
    (bare,) = read_questions({"questions": {"bare": {"type": "noul"}}})
    assert bare.options == [("true", ""), ("false", "")]


def test_logits_become_probabilities() -> None:
    def answer(kind: str, values: str, logits: list[float]) -> dict[str, object]:
        return Question("q", kind, "", [(value, value.upper()) for value in values]).answer(logits)

    likely = {"x": 0.5, "y": 0.25, "z": 0.25}
    sure = 1 - 1.5 * math.log(2) / math.log(3)
    assert answer("noul", "tf", [1000.0, 1000.0]) == {"type": "noul", "noul": 0.5}
    assert answer("choice", "xyz", [9 + each for each in LOGITS]) == {
        "type": "choice",
        "choice": "x",
        "probabilities": pytest.approx(likely),
        "confidence": pytest.approx(sure),
    }
    assert answer("score", "012", LOGITS) == {
        "type": "score",
        "score": pytest.approx(0.75),
        "legend": {"0": "0", "1": "1", "2": "2"},
        "probabilities": pytest.approx(dict(zip("012", likely.values(), strict=True))),
        "confidence": pytest.approx(sure),
    }
    assert answer("choice", "xy", [0.0, -9999.0])["confidence"] == pytest.approx(1)


def test_all_questions_share_all_but_the_last_line() -> None:
    questions = read_questions({"questions": {"urgent": URGENT, "team": TEAM}})
    first, second = contents({"state": {"text": "<b>"}}, questions)
    told, last = first.rsplit("\n", 1)
    assert (told, "Requested field: team") == tuple(second.rsplit("\n", 1))
    assert last == "Requested field: urgent"
    assert "<" not in told
    assert json.loads(told) == {"context": {"text": "<b>"}, "schema": [question.schema for question in questions]}
