"""Decisions, for which hosts since 0.35 ask a runner for something other than a completion.

`POST /v1/systemone` answers questions about a state by the probabilities of their options. A question becomes a row of
the runner's `/v1/score`: the model's chat template around the state, all questions, and the name of the one that is
asked; its options are the letters from A on (docs/internals/wire.md, 11).
"""

import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from scripts.tools.host.go_json import Body, RefusedError, json_response, keep_alive_of, read_body, text_of
from scripts.tools.host.shelf import Shelf

MOST_QUESTIONS, MOST_OPTIONS, MOST_BYTES = 64, 26, 64 << 10
_KINDS = ("noul", "choice", "score")
"""The types of questions: yes or no, one of several, a level."""


@dataclass(frozen=True)
class Question:
    """One question. `options` are values and what they mean: true and false, names in their order, or levels from 0."""

    name: str
    kind: str
    instructions: str
    options: Sequence[tuple[str, str]]

    @property
    def codes(self) -> str:
        return string.ascii_uppercase[: len(self.options)]

    @property
    def schema(self) -> dict[str, object]:
        """The question as the model reads it."""
        options = zip(self.codes, self.options, strict=True)
        choices = [{"code": code, "value": value, "description": text} for code, (value, text) in options]
        return {"name": self.name, "description": self.instructions, "choices": choices}

    def answer(self, logits: Sequence[float]) -> dict[str, object]:
        """Returns the answer for the user, from the logits of the options."""
        likely = softmax(logits)
        if self.kind == "noul":
            return {"type": "noul", "noul": likely[0]}
        entropy = -sum(each * math.log(each) for each in likely if each > 0)
        values = [value for value, _ in self.options]
        rest = {
            "probabilities": dict(zip(values, likely, strict=True)),
            "confidence": 1 - entropy / math.log(len(likely)),
        }
        if self.kind == "choice":
            return {"type": "choice", "choice": max(zip(likely, values, strict=True))[1], **rest}
        score = sum(level * each for level, each in enumerate(likely))
        return {"type": "score", "score": score, "legend": dict(self.options), **rest}


def softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(each - max(logits)) for each in logits]
    return [weight / sum(weights) for weight in weights]


def read_questions(body: Body) -> list[Question]:
    """Returns the questions of a request. Raises `RefusedError`."""
    given = body.get("questions")
    if not isinstance(given, dict) or not 1 <= len(given) <= MOST_QUESTIONS:
        raise RefusedError(400, f"questions must contain 1 to {MOST_QUESTIONS} questions")
    return [_question(name, each) for name, each in given.items()]


def _question(name: str, given: object) -> Question:
    if not isinstance(given, dict) or given.get("type") not in _KINDS:
        raise RefusedError(400, f'question "{name}": its type must be one of {", ".join(_KINDS)}')
    kind, criteria = str(given["type"]), given.get("criteria")
    if isinstance(criteria, dict):
        names = ["true", "false"] if kind == "noul" else sorted(criteria)
        options = [(value, criteria.get(value, "")) for value in names]
    elif isinstance(criteria, list):
        options = [(str(level), text) for level, text in enumerate(criteria)]
    else:
        options = [("true", ""), ("false", "")] if kind == "noul" else []
    if (kind == "score") != isinstance(criteria, list) or not all(isinstance(text, str) for _, text in options):
        wanted = "a list of levels" if kind == "score" else "an object of options and their meanings"
        raise RefusedError(400, f'question "{name}": criteria must be {wanted}')
    if not 2 <= len(options) <= MOST_OPTIONS:
        raise RefusedError(400, f'question "{name}" requires 2 to {MOST_OPTIONS} options')
    return Question(name, kind, text_of(given, "instructions"), options)


def contents(body: Body, questions: Sequence[Question]) -> Iterator[str]:
    """Yields the text of the user's message for each question. Texts differ in the last line only, for the cache.

    Raises `RefusedError`.
    """
    state = body.get("state")
    if state is None or state in ("", {}, []):
        raise RefusedError(400, "state must not be empty")
    told = _json({"context": state, "schema": [question.schema for question in questions]})
    if len(told.encode()) > MOST_BYTES:
        raise RefusedError(413, "text and schema must not exceed 64 KiB")
    yield from (f"{told}\n\nRequested field: {question.name}" for question in questions)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace(">", "\\u003e")


def read_logits(scored: Mapping[str, object], questions: Sequence[Question]) -> list[list[float]]:
    """Returns the logits of a runner's answer. Raises `RefusedError` if it is not what was asked for."""
    rows = scored.get("logits")
    if not isinstance(rows, list) or len(rows) != len(questions):
        raise RefusedError(500, f"scorer returned {len(rows) if isinstance(rows, list) else 0} rows")
    for row, question in zip(rows, questions, strict=True):
        if not isinstance(row, list) or len(row) != len(question.options):
            raise RefusedError(500, f'scorer returned another number of logits for "{question.name}"')
        if not all(isinstance(each, (int, float)) and math.isfinite(each) for each in row):
            raise RefusedError(500, "scorer returned a logit that is not finite")
    return rows


class Decisions:
    """The routes. Any decoder decides here; Ollama asks those alone that are made for it."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/systemone", self._decide)]

    async def _decide(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        questions = read_questions(body)
        said = list(contents(body, questions))
        model = self._shelf.find(text_of(body, "model"))
        template = self._shelf.template(model)
        think = None if template.closing is None else False
        prompts = [await template.render([{"role": "user", "content": text}], think=think) for text in said]
        rows = [
            {"prompt": prompt, "candidates": list(question.codes)}
            for prompt, question in zip(prompts, questions, strict=True)
        ]
        async with self._shelf.runner(model, body, keep_alive_of(body)) as loaded:
            scored = await loaded.client.ask("/v1/score", {"max_tokens": loaded.context_length, "rows": rows})
        logits = read_logits(scored, questions)
        answers = {question.name: question.answer(row) for question, row in zip(questions, logits, strict=True)}
        usage = {"input_tokens": scored["input_tokens"], "output_tokens": scored.get("output_tokens", 0)}
        cached = {"prompt_eval_cached_count": scored["cached_tokens"]} if "cached_tokens" in scored else {}
        return json_response({"model": text_of(body, "model"), "answers": answers, "usage": usage, **cached})
