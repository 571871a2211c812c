"""Real releases of Ollama with our runner, through their own API. Each is named in the environment:

OLLAMA_BINARIES=/path/to/ollama:/path/to/another scripts/test tests/process/launcher/test_real_ollama.py
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from scripts.tools.demo.questions import CONVERSATIONS, SMALL_TALK
from scripts.tools.demo.subjects import MODEL, WEIGHTS, demo_store
from tests.process.launcher.ollama import (
    Ollama,
    add_template,
    chat_body,
    launched,
    lines,
    listed,
    text_of,
)
from tests.process.launcher.standin import eventually_gone

BINARIES = [binary for binary in os.environ.get("OLLAMA_BINARIES", "").split(":") if binary]
STORY = "Tell me a story."
GREEDY = {"temperature": 0}
TOO_LONG = "word " * 5000
CONTEXT_TOKENS = 8192

if not BINARIES:
    reason = (
        "needs a real Ollama: OLLAMA_BINARIES=/path/to/ollama scripts/test tests/process/launcher/test_real_ollama.py"
    )
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """The store: the demo model with a chat template."""
    with demo_store() as models:
        add_template(models)
        yield models


@pytest.fixture(scope="module", params=BINARIES, ids=lambda binary: Path(binary).name)
def ollama(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ollama]:
    with Ollama(launched(request.param), models, tmp_path_factory.mktemp("ollama")) as ollama:
        yield ollama


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


async def eventually(holds: Callable[[], bool]) -> bool:
    """Returns True if it comes to hold within a minute."""
    for _ in range(600):
        if holds():
            return True
        await asyncio.sleep(0.1)
    return False


async def test_the_model_is_listed_and_shown(ollama: Ollama) -> None:
    models = listed((await ollama.ask("/api/tags")).last, "models")
    assert MODEL in [model["name"] for model in models]
    (shown,) = (await ollama.ask("/api/show", {"model": "demo"})).objects
    assert shown["capabilities"] == ["completion"]
    information = shown["model_info"]
    assert isinstance(information, dict)
    assert information["llama.context_length"] == CONTEXT_TOKENS


async def test_generate_raw(ollama: Ollama) -> None:
    prompt = CONVERSATIONS[0].prompt(0)
    body = {"model": "demo", "prompt": prompt, "raw": True, "stream": False, "options": GREEDY}
    answer = await ollama.ask("/api/generate", body)
    assert answer.status == 200
    assert answer.text == CONVERSATIONS[0].turns[0].answer
    assert answer.last["done_reason"] == "stop"
    assert "context" not in answer.last
    again = await ollama.ask("/api/generate", body)
    for key in ("response", "prompt_eval_count", "eval_count"):
        assert again.last[key] == answer.last[key]
    if "prompt_eval_cached_count" in answer.last:
        cached, total = again.last["prompt_eval_cached_count"], again.last["prompt_eval_count"]
        assert isinstance(cached, int)
        assert cached + 1 == total


async def test_generate_streams_and_gives_its_context(ollama: Ollama) -> None:
    body = {"model": "demo", "prompt": STORY, "options": GREEDY}
    streamed = await ollama.ask("/api/generate", body)
    whole = await ollama.ask("/api/generate", {**body, "stream": False})
    assert streamed.text == whole.text == SMALL_TALK[STORY]
    assert len(streamed.objects) > 10
    assert len(whole.objects) == 1
    context = whole.last["context"]
    assert isinstance(context, list)
    assert streamed.last["context"] == context
    prompt, generated = whole.last["prompt_eval_count"], whole.last["eval_count"]
    assert isinstance(prompt, int)
    assert isinstance(generated, int)
    assert abs(len(context) - prompt - generated) <= 1


async def test_a_chat_of_several_turns(ollama: Ollama) -> None:
    for conversation in CONVERSATIONS[1:3]:
        system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        said: list[str] = []
        for turn in conversation.turns:
            body = chat_body(*said, turn.user)
            body["messages"] = [*system, *listed(body, "messages")]
            answer = await ollama.ask("/api/chat", {**body, "stream": True})
            assert answer.status == 200
            assert answer.text == turn.answer
            said += [turn.user, turn.answer]


async def test_options(ollama: Ollama) -> None:
    cut = await ollama.chat(STORY, options={**GREEDY, "num_predict": 5})
    assert cut.last["eval_count"] == 5
    assert cut.last["done_reason"] == "length"
    assert SMALL_TALK[STORY].startswith(cut.text)
    stopped = await ollama.chat("Hello", options={**GREEDY, "stop": ["!"]})
    sends_stop = ollama.version >= (0, 21, 1)
    assert stopped.text == ("Hello" if sends_stop else SMALL_TALK["Hello"])
    if sends_stop:  # so does the seed
        hot = {"temperature": 5, "top_p": 1, "top_k": 0, "num_predict": 20}
        first, same, other = [(await ollama.chat(STORY, options={**hot, "seed": seed})).text for seed in (7, 7, 8)]
        assert first == same != other


async def test_logprobs(ollama: Ollama) -> None:
    options = {**GREEDY, "num_predict": 3}
    answer = await ollama.chat("Name the seasons.", options=options, logprobs=True, top_logprobs=2)
    if ollama.version < (0, 21, 1):
        assert "logprobs" not in answer.last
        return
    tokens = listed(answer.last, "logprobs")
    assert "".join(token["token"] for token in tokens) == answer.text
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0 for token in tokens)
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


async def test_structured_output(ollama: Ollama) -> None:
    """Since 0.33.1 hosts send the format to the runner, which refuses it; before, MLX models know none."""
    answer = await ollama.chat("Hello", format="json")
    if ollama.version >= (0, 33, 1):
        assert answer.status == 400
        assert "Format (structured output) is not supported" in str(answer.last["error"])
    else:
        assert answer.text == SMALL_TALK["Hello"]


async def test_a_prompt_that_is_too_long(ollama: Ollama) -> None:
    body = {"model": "demo", "prompt": TOO_LONG, "raw": True, "options": GREEDY}
    for answer in (await ollama.ask("/api/generate", body), await ollama.chat(TOO_LONG)):
        assert answer.status == (400 if ollama.version >= (0, 21, 1) else 500)
        error = str(answer.last["error"])
        assert error.endswith(f" tokens) exceeds the model's maximum context length ({CONTEXT_TOKENS} tokens)")
    assert (await ollama.chat("Hello")).text == SMALL_TALK["Hello"]


async def test_two_requests_at_once(ollama: Ollama) -> None:
    questions = (STORY, "Count from one to twenty.", "Hello")
    answers = await asyncio.gather(*(ollama.chat(question) for question in questions))
    assert [answer.text for answer in answers] == [SMALL_TALK[question] for question in questions]


async def test_a_cancelled_stream(ollama: Ollama) -> None:
    before = ollama.log.count("outcome=cancelled")
    async with ollama.stream("/api/chat", chat_body(STORY, stream=True)) as response:
        first = await anext(lines(response))
        assert text_of(first)
    assert await eventually(lambda: ollama.log.count("outcome=cancelled") == before + 1)
    assert (await ollama.chat("Who are you?")).text == SMALL_TALK["Who are you?"]


async def test_its_report_of_the_running_model(ollama: Ollama) -> None:
    await ollama.chat("Hello")
    (model,) = listed((await ollama.ask("/api/ps")).last, "models")
    assert model["name"] == MODEL
    assert model["size"] == model["size_vram"] > 0
    assert model["context_length"] > 0


async def test_the_openai_routes(ollama: Ollama) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    (choice,) = listed((await ollama.ask("/v1/chat/completions", body)).last, "choices")
    assert choice["message"]["content"] == SMALL_TALK["Hello"]
    assert choice["finish_reason"] == "stop"


async def test_its_own_client(ollama: Ollama, request: pytest.FixtureRequest) -> None:
    binary = request.node.callspec.params["ollama"]
    command = [binary, "run", "demo", "Hello"]
    done = await asyncio.to_thread(
        subprocess.run, command, env=ollama.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert done.stdout.strip()


async def test_a_model_that_it_has_made_itself(ollama: Ollama, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    binary = request.node.callspec.params["ollama"]
    source = shutil.copytree(WEIGHTS, tmp_path / "source")
    (source / "Modelfile").write_text("FROM .\n")
    command = [*launched(binary), "create", "--experimental", "made", "-f", "Modelfile"]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=source, env=ollama.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    body = {"model": "made", "prompt": CONVERSATIONS[1].prompt(0), "raw": True, "stream": False, "options": GREEDY}
    assert (await ollama.ask("/api/generate", body)).text == CONVERSATIONS[1].turns[0].answer


async def test_unloading_and_loading_again(ollama: Ollama) -> None:
    await ollama.chat("Hello")
    (runner,) = ollama.runners
    assert " -I -m runner runner " in ollama.runners[runner], "it is ours"
    unloaded = await ollama.ask("/api/generate", {"model": "demo", "keep_alive": 0})
    assert unloaded.last["done_reason"] == "unload"
    assert await eventually(lambda: not ollama.runners)
    assert (await ollama.chat("Hello")).text == SMALL_TALK["Hello"]
    (other,) = ollama.runners
    assert other != runner


async def test_a_runner_that_was_killed_is_started_again(ollama: Ollama) -> None:
    await ollama.chat("Hello")
    (runner,) = ollama.runners
    os.kill(runner, signal.SIGKILL)
    assert await eventually(lambda: not ollama.runners)
    await asyncio.sleep(0.5)
    answers = [await ollama.chat("Hello") for _ in range(2)]
    assert answers[-1].text == SMALL_TALK["Hello"]
    assert runner not in ollama.runners


async def test_ending_it_leaves_nothing_behind(
    request: pytest.FixtureRequest, models: Path, tmp_path: Path, ollama: Ollama
) -> None:
    binary = request.node.callspec.params["ollama"]
    for number in (signal.SIGINT, signal.SIGKILL):
        place = tmp_path / number.name
        place.mkdir()
        with Ollama(launched(binary), models, place) as another:
            assert (await another.chat("Hello")).text == SMALL_TALK["Hello"]
            runners = another.runners
            assert len(runners) == 1
            (directory,) = (place / "cache" / "ollama-mlx-runner").iterdir()
            another.popen.send_signal(number)
            assert another.popen.wait(60) == (0 if number == signal.SIGINT else -number)
            for runner in runners:
                assert await eventually(partial(is_gone, runner))
            assert eventually_gone(directory)


async def test_no_errors_were_logged(ollama: Ollama) -> None:
    """Stands last: the log of all tests before."""
    assert "Traceback" not in ollama.log
    assert "panic" not in ollama.log
