"""`scripts/host` as a person uses it: the real runner, the demo model, Ollama's interface over HTTP."""

import base64
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import aiohttp
import pytest

from scripts.tools.demo.questions import CONVERSATIONS
from scripts.tools.models.png import png
from scripts.tools.models.sources import write_source
from tests import ROOT

GREEDY = {"temperature": 0}
TALK = CONVERSATIONS[2]
LAST_KEYS = [
    *("done", "done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_cached_count"),
    *("prompt_eval_duration", "eval_count", "eval_duration"),
]


class Served(NamedTuple):
    """A running `scripts/host`: where it is, and what it and its runner have written to stderr."""

    url: str
    process: "subprocess.Popen[str]"
    stderr: Path

    def pids(self) -> list[int]:
        """Of its runners that are alive."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return [int(line.split()[0]) for line in listed.stdout.splitlines() if " --model " in line]


@contextmanager
def served(words: Sequence[str], directory: Path) -> Iterator[Served]:
    """Started with `words` on a free port, and ended as a person ends it."""
    stderr = directory / "stderr.txt"
    argv = [sys.executable, "-m", "scripts.tools.host.main", "--port", "0", *words]
    with (
        stderr.open("w") as file,
        subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        assert process.stdout is not None
        limit = threading.Timer(60, process.kill)
        limit.start()
        for line in process.stdout:
            if found := re.search(r"http://\S+:\d+", line):
                break
        else:
            raise AssertionError(f"it ended, or said nothing for 60 s: {stderr.read_text()}")
        limit.cancel()
        served = Served(found[0], process, stderr)
        try:
            yield served
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(["--", "--prefill-chunk", "16"], tmp_path_factory.mktemp("host")) as host:
        yield host


class Answered(NamedTuple):
    status: int
    kind: str
    lines: list[dict[str, object]]

    @property
    def last(self) -> dict[str, object]:
        return self.lines[-1]


async def ask(host: Served, path: str, body: object) -> Answered:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.post(host.url + path, json=body) as response,
    ):
        text = await response.text()
        return Answered(response.status, response.content_type, [json.loads(line) for line in text.splitlines()])


def chat_of(turns: int) -> list[dict[str, str]]:
    """The first turns of the conversation and the next question."""
    said = [
        {"role": role, "content": content}
        for turn in TALK.turns[:turns]
        for role, content in (("user", turn.user), ("assistant", turn.answer))
    ]
    return [*said, {"role": "user", "content": TALK.turns[turns].user}]


async def test_generate_streams_lines_of_ollamas_shape_and_ends_with_the_context(host: Served) -> None:
    answer = await ask(host, "/api/generate", {"model": "demo", "prompt": "Hello", "options": GREEDY})
    assert (answer.status, answer.kind) == (200, "application/x-ndjson")
    assert len(answer.lines) > 5
    for line in answer.lines[:-1]:
        assert list(line) == ["model", "created_at", "response", "done"]
        assert (line["model"], line["done"]) == ("demo", False)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", str(line["created_at"]))
    assert "".join(str(line["response"]) for line in answer.lines) == TALK.turns[0].answer
    assert list(answer.last) == ["model", "created_at", "response", *LAST_KEYS[:2], "context", *LAST_KEYS[2:]]
    counts = [answer.last[key] for key in ("prompt_eval_count", "eval_count")]
    context = answer.last["context"]
    assert isinstance(context, list)
    assert len(context) == counts[0] + counts[1]  # type: ignore[operator]  # two integers


async def test_a_chat_of_several_turns_streamed_and_whole(host: Served) -> None:
    for number in range(len(TALK.turns)):
        stream = number % 2 == 0
        body = {"model": "demo:latest", "messages": chat_of(number), "options": GREEDY, "stream": stream}
        answer = await ask(host, "/api/chat", body)
        assert answer.kind == ("application/x-ndjson" if stream else "application/json")
        messages = [line["message"] for line in answer.lines]
        assert all(isinstance(message, dict) and message["role"] == "assistant" for message in messages)
        text = "".join(message["content"] for message in messages if isinstance(message, dict))
        assert text == TALK.turns[number].answer
        assert list(answer.last) == ["model", "created_at", "message", *LAST_KEYS]
        assert not stream or len(answer.lines) > 1
        if number:
            cached, count = answer.last["prompt_eval_cached_count"], answer.last["prompt_eval_count"]
            assert isinstance(cached, int)
            assert isinstance(count, int)
            assert count > cached > count // 4


async def test_questions_are_decided_by_probabilities_and_nothing_is_embedded(host: Served) -> None:
    questions = {
        "letter": {"type": "choice", "instructions": "Which?", "criteria": {"a": "one", "b": "two", "c": "three"}},
        "level": {"type": "score", "instructions": "How much?", "criteria": ["none", "some"]},
    }
    body = {"model": "demo", "state": "Hello", "questions": questions}
    told, again = [(await ask(host, "/v1/systemone", body)).last for _ in range(2)]
    answers, usage = told["answers"], told["usage"]
    assert isinstance(answers, dict)
    assert isinstance(usage, dict)
    assert [sum(answers[name]["probabilities"].values()) for name in questions] == [pytest.approx(1)] * 2
    assert again["answers"] == answers
    assert again["prompt_eval_cached_count"] == usage["input_tokens"] - 2
    long = await ask(host, "/v1/systemone", {**body, "state": "x" * 20000})
    assert long.status == 400
    assert "input is never truncated" in str(long.last["error"])
    text = "this model does not support embeddings"
    for path, status, error in (
        ("/api/embed", 501, text),
        ("/api/embeddings", 500, text),
        ("/v1/embeddings", 501, {"message": text, "type": "api_error", "param": None, "code": None}),
    ):
        answer = await ask(host, path, {"model": "demo", "input": ["a", "b"], "prompt": "a"})
        assert answer == (status, "application/json", [{"error": error}])


async def test_texts_are_embedded_each_by_itself(tmp_path: Path) -> None:
    """By three routes; long ones are cut to the context, and vectors to the size that is wanted."""
    directory = write_source(tmp_path / "encoder", "embedding-gemma2")
    with served([str(directory)], tmp_path) as host:
        texts, model = ["one", "another text", "z" * 9000], "encoder"
        whole = (await ask(host, "/api/embed", {"model": model, "input": texts})).last
        vectors, count = vectors_of(whole["embeddings"]), whole["prompt_eval_count"]
        assert [len(each) for each in vectors] == [768] * 3
        assert 4096 < int(str(count)) < 4096 + 30, "the host's own num_ctx"
        cut = (await ask(host, "/api/embed", {"model": model, "input": texts, "dimensions": 128})).last
        assert vectors_of(cut["embeddings"])[0] == pytest.approx(of_length_1(vectors[0][:128]), abs=1e-6)
        (old,) = vectors_of([(await ask(host, "/api/embeddings", {"model": model, "prompt": "one"})).last["embedding"]])
        assert old == pytest.approx(vectors[0], abs=1e-6)
        openai = (await ask(host, "/v1/embeddings", {"model": model, "input": "one", "encoding_format": "base64"})).last
        (entry,) = cast("list[dict[str, str]]", openai["data"])
        numbers = struct.unpack("<768f", base64.b64decode(entry["embedding"]))
        assert numbers == pytest.approx(vectors[0], abs=1e-6)
        refused = {
            "dimensions": (100, "dimensions 100 not supported by this model; valid values are [128 256 512 768]"),
            "truncate": (False, "the input length exceeds the context length"),
            "input": (3, "invalid input type"),
        }
        for key, (value, text) in refused.items():
            answer = await ask(host, "/api/embed", {"model": model, "input": texts, key: value})
            assert (answer.status, answer.last) == (400, {"error": text})
        assert (await ask(host, "/api/show", {"model": model})).last["capabilities"] == ["embedding", "vision"]


def vectors_of(found: object) -> list[list[float]]:
    return cast("list[list[float]]", found)


def of_length_1(numbers: Sequence[float]) -> list[float]:
    return [each / math.hypot(*numbers) for each in numbers]


RED, BLUE = (base64.b64encode(png(40, 30, colour)).decode() for colour in ((250, 0, 0), (0, 0, 250)))


async def test_a_chat_with_a_picture_is_answered(tmp_path: Path) -> None:
    with served([str(write_source(tmp_path / "seeing", "qwen3.5-seeing"))], tmp_path) as host:
        await chat_about_pictures(host)


async def chat_about_pictures(host: Served) -> None:
    options = {"num_predict": 2, "temperature": 0}
    first = {"role": "user", "content": "What is this?"}
    plain = await ask(host, "/api/chat", {"model": "seeing", "messages": [first], "options": options})
    shown = {**first, "images": [RED]}
    answer = await ask(host, "/api/chat", {"model": "seeing", "messages": [shown], "options": options})
    assert (plain.status, answer.status) == (200, 200)
    assert int(str(answer.last["prompt_eval_count"])) > int(str(plain.last["prompt_eval_count"])) + 60
    turn = {"role": "user", "content": "And this?", "images": [BLUE]}
    talk = [shown, {"role": "assistant", "content": "Red."}, turn]
    again = await ask(host, "/api/chat", {"model": "seeing", "messages": talk, "options": options})
    assert int(str(again.last["prompt_eval_cached_count"])) > 60, "the first picture is not read again"
    body = {"model": "seeing", "prompt": "[img] is what?", "images": [BLUE], "options": options}
    assert (await ask(host, "/api/generate", body)).status == 200


def test_ctrl_c_ends_it_and_its_runner(tmp_path: Path) -> None:
    """Also: a directory as the model, another generation, and words for the runner."""
    with served(["scripts/demo_model", "--generation", "F", "--", "--cache", "none"], tmp_path) as host:
        (pid,) = host.pids()
    assert host.process.returncode == 0
    text = host.stderr.read_text()
    assert "cache=none" in text
    assert "Traceback" not in text
    assert "scripts/host:" not in text
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
