"""Runners that do one thing wrong, and the cases that must notice."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.tools.conformance.proxy import Body, Breakage


class Broken(NamedTuple):
    """A breakage, and the cases that fail with it: `A:40-eos` for generation A, `40-eos` for G."""

    breakage: Breakage
    fails: tuple[str, ...]


COUNTERS = ("EvalCount", "PromptEvalCount", "EvalDuration", "PromptEvalDuration")
PENALTIES = ("presence_penalty", "frequency_penalty", "repeat_penalty")
FILTERS = ("top_k", "top_p", "min_p")


def with_options(edit: Callable[[Body], Body]) -> Callable[[Body], Body]:
    """A request whose options are edited."""

    def request(body: Body) -> Body:
        key = "options" if "options" in body else "Options"
        return {**body, key: edit(dict(body.get(key) or {}))}

    return request


def without(*keys: str) -> Callable[[Body], Body]:
    """An object without these keys."""
    return lambda body: {key: value for key, value in body.items() if key not in keys}


def last(edit: Callable[[Body], Iterable[Body]]) -> Callable[[Body], Iterable[Body]]:
    """Edits the last line of a stream."""
    return lambda answer: edit(answer) if answer.get("Done") else [answer]


def content(edit: Callable[[str], str]) -> Callable[[Body], Iterable[Body]]:
    """Edits the text of every line."""
    return lambda answer: [{**answer, "Content": edit(answer.get("Content") or "")}]


def scaled(entry: Body) -> Body:
    """An entry whose values are those of a temperature of 2, or so."""
    halves = {key: value / 2 for key, value in entry.items() if key == "logprob"}
    tops = {key: [scaled(top) for top in value] for key, value in entry.items() if key == "top_logprobs"}
    return {**entry, **halves, **tops}


def status_of(*statuses: int, becomes: int) -> Callable[[str, int, bytes], tuple[int, bytes]]:
    """Answers with one of these statuses get another one."""
    return lambda path, status, body: (becomes if status in statuses else status, body)


def body_of(path: str, edit: Callable[[Body], object]) -> Callable[[str, int, bytes], tuple[int, bytes]]:
    """Edits the JSON that a path answers with."""
    return lambda at, status, body: (
        status,
        json.dumps(edit(json.loads(body))).encode() if at == path and status == 200 else body,
    )


SEEDS = itertools.count()


def hot(options: Body) -> Body:
    return {"temperature": 0.8, "seed": next(SEEDS), **options}


def plus(key: str, amount: int) -> Callable[[Body], Iterable[Body]]:
    return lambda answer: [{**answer, key: answer[key] + amount}]


def uncached(answer: Body) -> Iterable[Body]:
    """Counts only the tokens that were computed."""
    return [{**answer, "PromptEvalCount": answer["PromptEvalCount"] - (answer.get("PromptEvalCachedCount") or 0)}]


BROKEN: dict[str, Broken] = {
    "sends no last line": Broken(
        Breakage(line=last(lambda answer: [])),
        ("22-v1-completions",),
    ),
    "writes floats": Broken(
        Breakage(line=last(lambda answer: [{**answer, **{key: float(answer[key]) for key in COUNTERS}}])),
        ("46-plain-integers", "30-only-a-bos", "B:41-eos-after-limit"),
    ),
    "counts what it computed": Broken(Breakage(line=last(uncached)), ("43-prompt-count", "78-left-in-decode")),
    "counts the EOS": Broken(
        Breakage(line=last(plus("EvalCount", 1))),
        ("39-no-limit",),
    ),
    "always stops": Broken(
        Breakage(line=last(lambda answer: [{**answer, "DoneReason": 0}])),
        ("39-context-end", "31-context-full"),
    ),
    "sends lines of 100 KB": Broken(
        Breakage(line=content(lambda text: text * 100)), ("45-long-text", "45-long-logprobs")
    ),
    "strips spaces": Broken(Breakage(line=content(str.strip)), ("48-leading-space",)),
    "is warm by default": Broken(
        Breakage(request=with_options(hot)), ("36-greedy", "37-greedy-despite-filters", "65-ties")
    ),
    "draws at random": Broken(
        Breakage(request=with_options(lambda options: {**options, "seed": -1})),
        ("53-seed", "54-absent-seed-is-zero"),
    ),
    "knows no penalties": Broken(
        Breakage(request=with_options(without(*PENALTIES))),
        ("56-presence-penalty", "57-repeat-penalty", "58-frequency-penalty", "64-sliding-window"),
    ),
    "knows no filters": Broken(
        Breakage(request=with_options(without(*FILTERS))), ("61-top-k", "62-top-p-and-min-p", "63-top-k-before-top-p")
    ),
    "gives logprobs to everybody": Broken(
        Breakage(request=lambda body: {**body, "Logprobs": True}), ("66-not-asked-for",)
    ),
    "refuses with 500": Broken(
        Breakage(reply=status_of(400, becomes=500)),
        ("25-bad-request", "27-wrong-option-types", "29-empty-prompt"),
    ),
    "ignores media": Broken(
        Breakage(request=without("Media")),
        ("32-media-refused", "33-image-tags"),
    ),
    "ignores formats": Broken(Breakage(request=without("Format")), ("11.8-bad-format", "11.9-format-not-ignored")),
    "tokenizes into an object": Broken(
        Breakage(reply=body_of("/v1/tokenize", lambda body: {"tokens": body})),
        ("71-text", "72-special", "73-inside-the-final-line", "74-empty"),
    ),
}
