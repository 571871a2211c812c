"""Runners that do one thing wrong, and the cases that must notice."""

import base64
import itertools
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from scripts.tools.host.lib import E, F, G
from scripts.tools.models.png import png
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


def entries(edit: Callable[[list[Body]], list[Body]]) -> Callable[[Body], Iterable[Body]]:
    """Edits the logprobs of every line that has some."""

    def line(answer: Body) -> Iterable[Body]:
        found = answer.get("Logprobs")
        return [{**answer, "Logprobs": edit(found)} if found else answer]

    return line


def with_top(edit: Callable[[list[Body]], list[Body]]) -> Callable[[list[Body]], list[Body]]:
    """Edits the likeliest tokens of every entry."""
    return lambda found: [
        {**entry, "top_logprobs": edit(entry["top_logprobs"])} if "top_logprobs" in entry else entry for entry in found
    ]


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


def with_media(edit: Callable[[Body], Body]) -> Callable[[Body], Body]:
    """A request whose pictures and sounds are edited."""
    return lambda body: {**body, "Media": [edit(item) for item in body.get("Media") or []]}


def unheard(data: str) -> str:
    """The same picture in a file that no runner has seen: decoders pass over what follows the end."""
    return base64.b64encode(base64.b64decode(data) + str(next(SEEDS)).encode()).decode()


ONE_PICTURE = base64.b64encode(png(64, 48, (20, 220, 30))).decode()
SEEDS = itertools.count()


def hot(options: Body) -> Body:
    return {"temperature": 0.8, "seed": next(SEEDS), **options}


def plus(key: str, amount: int) -> Callable[[Body], Iterable[Body]]:
    return lambda answer: [{**answer, key: answer[key] + amount}]


def uncached(answer: Body) -> Iterable[Body]:
    """Counts only the tokens that were computed."""
    return [{**answer, "PromptEvalCount": answer["PromptEvalCount"] - (answer.get("PromptEvalCachedCount") or 0)}]


def exact_keys(body: Body) -> Body:
    return {key: value for key, value in body.items() if key in {*G.request_keys}}


def known_keys(body: Body) -> Body | None:
    """Refuses what hosts before September 2026 do not send."""
    options = body.get("Options") or {}
    return body if {*body} <= {*F.request_keys, "prompt", "options"} and {*options} <= {*E.option_keys} else None


def no_nulls(body: Body) -> Body | None:
    """Refuses null, absent options, and an empty prompt."""
    media = body.get("Media", "absent")
    return body if body.get("Prompt") and body.get("Options") is not None and media is not None else None


def chained(*edits: Callable[[str, int, bytes], tuple[int, bytes]]) -> Callable[[str, int, bytes], tuple[int, bytes]]:
    """One edit of an answer after the other."""

    def reply(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        for edit in edits:
            status, body = edit(path, status, body)
        return status, body

    return reply


BROKEN: dict[str, Broken] = {
    "sends no last line": Broken(
        Breakage(line=last(lambda answer: [])),
        (
            *("21-completion", "22-v1-completions", "38-num-predict", "42-eos-first", "40-eos"),
            *("A:21-own-words", "A:39-no-limit"),
        ),
    ),
    "writes floats": Broken(
        Breakage(line=last(lambda answer: [{**answer, **{key: float(answer[key]) for key in COUNTERS}}])),
        ("46-plain-integers", "B:46-plain-integers", "30-only-a-bos", "B:41-eos-after-limit"),
    ),
    "has one spelling of the counters": Broken(
        Breakage(line=lambda answer: [{key: value for key, value in answer.items() if "_" not in key}]),
        ("52-both-spellings", "A:21-own-words", "A:38-num-predict", "A:43-prompt-count"),
    ),
    "counts what it computed": Broken(Breakage(line=last(uncached)), ("43-prompt-count", "78-left-in-decode")),
    "counts the EOS": Broken(
        Breakage(line=last(plus("EvalCount", 1))),
        ("40-eos", "39-no-limit", "49-utf8", "45-long-text", "E:42-eos-first"),
    ),
    "always stops": Broken(
        Breakage(line=last(lambda answer: [{**answer, "DoneReason": 0}])),
        ("38-num-predict", "41-eos-after-limit", "39-context-end", "31-context-full"),
    ),
    "never stops": Broken(
        Breakage(line=last(lambda answer: [{**answer, "DoneReason": 1}])), ("40-eos", "42-eos-first", "50-stop-strings")
    ),
    "has counters on every line": Broken(
        Breakage(request=lambda body: {**body, "IncludeIntermediateMetrics": True}),
        ("44-lines-before-the-last", "11.4-intermediate-metrics"),
    ),
    "sends everything at the end": Broken(Breakage(whole=True), ("45-flushed",)),
    "sends lines of 100 KB": Broken(
        Breakage(line=content(lambda text: text * 100)), ("45-long-text", "45-long-logprobs", "C:45-long-text")
    ),
    "strips spaces": Broken(Breakage(line=content(str.strip)), ("48-leading-space", "A:48-leading-space")),
    "merges replacement characters": Broken(
        Breakage(line=content(lambda text: text.replace("\ufffd\ufffd", "\ufffd"))), ("49-utf8",)
    ),
    "shows what is left at the end": Broken(
        Breakage(line=last(lambda answer: [{"Content": "\ufffd", "Done": False}, answer])),
        ("49-utf8-tail", "42-eos-first"),
    ),
    "hides special tokens": Broken(
        Breakage(line=content(lambda text: text.replace("<think>", ""))), ("47-special-tokens",)
    ),
    "is of another type": Broken(Breakage(kind="text/event-stream"), ("21-completion",)),
    "is warm by default": Broken(
        Breakage(request=with_options(hot)), ("36-greedy", "37-greedy-despite-filters", "65-ties", "A:36-greedy")
    ),
    "draws at random": Broken(
        Breakage(request=with_options(lambda options: {**options, "seed": -1})),
        ("53-seed", "54-absent-seed-is-zero", "E:54-absent-seed-is-zero"),
    ),
    "has seed 0 for everybody": Broken(
        Breakage(request=lambda body: {"Logprobs": False, **body}),
        ("A:55-absent-seed-is-random", "D:55-absent-seed-is-random"),
    ),
    "knows no penalties": Broken(
        Breakage(request=with_options(without(*PENALTIES))),
        (
            *("56-presence-penalty", "57-repeat-penalty", "58-frequency-penalty", "60-whole-context-window"),
            *("64-sliding-window", "C:56-presence-penalty", "D:57-repeat-penalty"),
        ),
    ),
    "has a window by default": Broken(
        Breakage(request=with_options(lambda options: {"repeat_last_n": 64, **options})), ("59-no-window-no-penalty",)
    ),
    "has a window of 64": Broken(
        Breakage(request=with_options(lambda options: {**options, "repeat_last_n": 64})), ("60-whole-context-window",)
    ),
    "knows no filters": Broken(
        Breakage(request=with_options(without(*FILTERS))), ("61-top-k", "62-top-p-and-min-p", "63-top-k-before-top-p")
    ),
    "gives logprobs to everybody": Broken(
        Breakage(request=lambda body: {**body, "Logprobs": True}), ("66-not-asked-for",)
    ),
    "loses the first logprob": Broken(
        Breakage(line=entries(lambda found: found[1:])),
        ("67-one-per-token", "68-likeliest-first", "70-several-tokens-per-character"),
    ),
    "has logprobs of what it shows": Broken(
        Breakage(line=lambda answer: [answer if answer.get("Content") else without("Logprobs")(answer)]),
        ("67-utf8-tail",),
    ),
    "sorts upwards": Broken(
        Breakage(line=entries(with_top(lambda tops: tops[::-1]))), ("68-likeliest-first", "69-large-logits")
    ),
    "has logprobs of what it draws from": Broken(
        Breakage(line=entries(lambda found: [scaled(entry) for entry in found])), ("69-raw-logits", "69-large-logits")
    ),
    "has no floor": Broken(
        Breakage(line=entries(with_top(lambda tops: [{**top, "logprob": top["logprob"] * 2} for top in tops]))),
        ("11.6-logprob-floor",),
    ),
    "knows upper-case keys only": Broken(
        Breakage(request=exact_keys), ("23-keys-in-any-case", "A:21-completion", "D:28-no-options")
    ),
    "knows no keys of tomorrow": Broken(
        Breakage(request=known_keys), ("24-unknown-keys", "11.2-new-keys", "11.9-format-not-ignored", "35-large-body")
    ),
    "wants everything": Broken(
        Breakage(request=no_nulls), ("28-null-and-empty", "28-no-options", "30-only-a-bos", "A:28-no-options")
    ),
    "wants nothing after the request": Broken(
        Breakage(raw=lambda body: body.rstrip().endswith(b"}")), ("26-trailing-text",)
    ),
    "refuses large bodies": Broken(Breakage(raw=lambda body: len(body) < 1 << 20), ("35-large-body",)),
    "refuses with 500": Broken(
        Breakage(reply=status_of(400, becomes=500)),
        (
            *("25-bad-request", "27-wrong-option-types", "29-empty-prompt", "31-context-full", "32-media-refused"),
            *("32-sound-refused", "32-damaged-picture", "33-image-tags", "34-refused-while-busy", "11.8-bad-format"),
            *("80-keep-alive",),
        ),
    ),
    "ignores media": Broken(
        Breakage(request=without("Media")),
        (
            *("32-media-refused", "F:32-media-refused", "32-sound-refused", "32-damaged-picture", "33-image-tags"),
            *("33-told-apart", "33-cached"),
        ),
    ),
    "knows one picture": Broken(
        Breakage(request=with_media(lambda item: {**item, "data": ONE_PICTURE, "Kind": "image"})),
        ("32-sound-refused", "32-damaged-picture", "33-told-apart", "33-cached", "F:33-told-apart"),
    ),
    "knows no picture again": Broken(
        Breakage(request=with_media(lambda item: {**item, "data": item["data"] and unheard(item["data"])})),
        ("33-cached",),
    ),
    "looks for tags everywhere": Broken(
        Breakage(request=lambda body: body if body.get("Media") or "[img-" not in body["Prompt"] else None),
        ("33-tags-as-text",),
    ),
    "ignores formats": Broken(Breakage(request=without("Format")), ("11.8-bad-format", "11.9-format-not-ignored")),
    "has no metrics in between": Broken(
        Breakage(request=without("IncludeIntermediateMetrics")),
        ("11.4-intermediate-metrics", "11.5-first-of-two-passes"),
    ),
    "does not say what was cached": Broken(
        Breakage(line=lambda answer: [without("PromptEvalCachedCount")(answer)]), ("11.3-cached-count",)
    ),
    "answers everything with 200": Broken(
        Breakage(reply=status_of(404, 405, becomes=200)),
        ("19-wrong-method", "19-unknown-path", "11.10-other-endpoints"),
    ),
    "has a status with a fraction": Broken(
        Breakage(
            reply=chained(
                body_of("/v1/status", lambda body: {**body, "Memory": body["Memory"] + 0.5}),
                body_of("/health", lambda body: {**body, "ContextLength": 4096}),
            )
        ),
        ("15-status", "16-ready-path", "16-health", "A:16-ready-path", "17-status-during-prefill"),
    ),
    "has no models": Broken(
        Breakage(reply=body_of("/v1/models", lambda body: {"Success": False})), ("20-models-and-load",)
    ),
    "answers one connection at a time": Broken(
        Breakage(busy_s=1.05),
        ("17-status-during-prefill", "18-status-during-decode", "34-refused-while-busy", "73-while-generating"),
    ),
    "is busy": Broken(Breakage(alone=True), ("75-simultaneous",)),
    "goes on for nobody": Broken(Breakage(deaf=True), ("76-left-in-prefill", "77-left-in-queue")),
    "closes connections": Broken(Breakage(closes=True), ("80-keep-alive",)),
    "tokenizes into an object": Broken(
        Breakage(reply=body_of("/v1/tokenize", lambda body: {"tokens": body})),
        ("71-text", "72-special", "73-inside-the-final-line", "74-empty", "A:73-inside-the-final-line"),
    ),
}
