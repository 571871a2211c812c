"""`scripts/host` as a person uses it: the real runner, the demo model, Ollama's interface over HTTP."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from scripts.tools.demo.questions import CONVERSATIONS, SMALL_TALK
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
def served(
    words: Sequence[str],
    directory: Path,
    command: Sequence[str] = (sys.executable, "-m", "scripts.tools.host.main"),
    cwd: Path = ROOT,
    **variables: str,
) -> Iterator[Served]:
    """Started with `words` on a free port, and ended as a person ends it."""
    stderr = directory / "stderr.txt"
    argv = [*command, "--port", "0", *words]
    environ = {**os.environ, **variables}
    with (
        stderr.open("w") as file,
        subprocess.Popen(argv, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=file, text=True) as process,
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


def test_what_lies_where_the_user_is_is_not_the_runners(tmp_path: Path) -> None:
    for name in ("runner", "msgspec", "jinja2"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    script = [str(ROOT / "scripts" / "host")]
    with served([], tmp_path, script, tmp_path, PYTHONPATH=":") as host:  # an empty entry is the current directory
        asyncio.run(_chats(host.url))


async def _chats(url: str) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": False, "options": GREEDY}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/api/chat", json=body) as response:
        assert (await response.json())["message"]["content"] == SMALL_TALK["Hello"]


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


async def ask(host: Served, path: str, body: object = None, raw: bytes | None = None) -> Answered:
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.request("GET" if data is None else "POST", host.url + path, data=data) as response,
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


def only(body: dict[str, object]) -> dict[str, object]:
    """The single model of a list."""
    models = body["models"]
    assert isinstance(models, list)
    (model,) = models
    assert isinstance(model, dict)
    return model


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


async def test_what_is_there_and_what_runs(host: Served) -> None:
    listed = only((await ask(host, "/api/tags")).last)
    assert listed["name"] == listed["model"] == "demo:latest"
    running = only((await ask(host, "/api/ps")).last)
    assert isinstance(running["size"], int)
    assert running["size"] == running["size_vram"]
    assert running["size"] > 1_000_000
    assert (running["digest"], running["context_length"]) == (listed["digest"], 4096)
    shown = (await ask(host, "/api/show", {"model": "demo"})).last
    assert shown["capabilities"] == ["completion"]
    assert "<|" in str(shown["template"])
    assert (await ask(host, "/api/version")).last == {"version": "0.40.12"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.head(host.url) as heartbeat,
        session.post(f"{host.url}/api/pull") as pull,
    ):
        assert (heartbeat.status, pull.status, await pull.text()) == (200, 404, "404 page not found")


@pytest.mark.parametrize(
    ("path", "raw", "status", "text"),
    [
        ("/api/generate", b"", 400, "missing request body"),
        ("/api/chat", b"{", 400, "Expecting"),
        ("/api/generate", b'{"model":"nope","prompt":"x"}', 404, "model 'nope' not found"),
        ("/api/chat", b"{}", 400, "model is required"),
        ("/api/chat", b'{"model":"demo","messages":"x"}', 400, "messages"),
        ("/api/chat", b'{"model":"demo","messages":[{"role":"user","content":"x"}],"think":true}', 400, "thinking"),
        ("/api/chat", b'{"model":"demo","messages":[{"role":"user","content":"x"}],"tools":[{}]}', 400, "tools"),
        ("/api/generate", b'{"model":"demo","prompt":"x","context":[1]}', 500, "not supported"),
        ("/api/generate", b'{"model":"demo","prompt":"x","options":{"top_k":"x"}}', 500, "type integer"),
        ("/api/generate", b'{"model":"demo","prompt":"x","keep_alive":"soon"}', 400, "invalid duration"),
        ("/api/generate", b'{"model":"demo","prompt":"x","options":{"num_predict":1e999}}', 400, "cannot unmarshal"),
        ("/api/generate", b'{"model":"demo","prompt":"x","options":{"temperature":NaN}}', 400, "invalid character 'N'"),
        ("/api/generate", b'{"model":"demo","prompt":"x","images":["iVBORw0KGgo="]}', 400, "image input"),
    ],
)
async def test_refusals_have_their_status_and_an_error(
    path: str, raw: bytes, status: int, text: str, host: Served
) -> None:
    answer = await ask(host, path, raw=raw)
    assert (answer.status, answer.kind) == (status, "application/json")
    assert list(answer.last) == ["error"]
    assert text in str(answer.last["error"])


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


def test_a_runner_that_does_not_load_gives_the_person_the_hosts_text() -> None:
    failing = f"{sys.executable} -I -S -c \"import os; os.write(2, b'Error: no\\n'); os._exit(1)\""
    command = [
        sys.executable,
        "-m",
        "scripts.tools.host.main",
        "scripts/demo_model",
        "--port",
        "0",
        "--runner",
        failing,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    *copied, told = done.stderr.splitlines()
    assert copied == ["Error: no"]
    assert told == ("scripts/host: demo_model:latest does not load: mlx runner failed: Error: no (exit: exit status 1)")


async def test_questions_are_decided_by_probabilities(host: Served) -> None:
    questions = {
        "letter": {"type": "choice", "instructions": "Which?", "criteria": {"a": "one", "b": "two", "c": "three"}},
        "level": {"type": "score", "instructions": "How much?", "criteria": ["none", "some"]},
    }
    body = {"model": "demo", "state": "Hello", "questions": questions}
    (told,) = (await ask(host, "/v1/systemone", body)).lines
    (again,) = (await ask(host, "/v1/systemone", body)).lines
    for name in questions:
        answer = told["answers"][name]  # type: ignore[index]  # an object
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
    assert again["answers"] == told["answers"]
    assert again["prompt_eval_cached_count"] == told["usage"]["input_tokens"] - 2  # type: ignore[index]  # an object
    answer = await ask(host, "/v1/systemone", {**body, "state": "x" * 20000})
    assert answer.status == 400
    assert "input is never truncated" in str(answer.last["error"])


@pytest.mark.parametrize(("path", "status"), [("/api/embed", 501), ("/api/embeddings", 500)])
async def test_a_decoder_embeds_nothing(path: str, status: int, host: Served) -> None:
    answer = await ask(host, path, {"model": "demo", "input": ["a", "b"], "prompt": "a"})
    assert answer == (status, "application/json", [{"error": "this model does not support embeddings"}])
