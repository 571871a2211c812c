"""Starts the runner on the demo model, as an Ollama host does, and streams two conversations to the terminal.

The runner is spawned as a host spawns it, once with a cache and once without. The demo model comes from an Ollama-style
store, and its answers are known; a real model (--real) has to give the same answers without a cache as with it. Exit
status 0 only if all of them were right.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import mlx.core as mx

from scripts.tools import ROOT
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.demo.questions import CONVERSATIONS, END, Message
from scripts.tools.demo.talk import Talk
from scripts.tools.host.lib import Answer, Client, G, LoadError, Process, Request, free_port, spawn
from scripts.tools.models.store import write_store
from scripts.tools.real import chat
from scripts.tools.real.main import model_or_exit

MODEL = "demo:latest"
WEIGHTS = ROOT / "scripts" / "demo_model"
TURNS = ((0, (0, 1)), (1, (0,)), (0, (2,)), (1, (1,)))
"""The talks in the order in which they are held, and the turns of each."""
REAL_QUESTIONS = {
    "Capitals": ("What is the capital of France?", "And the capital of Italy?", "Name three things to see there."),
    "The sky": ("Why is the sky blue?", "Say that in five words."),
}
GREEDY = {"num_predict": 200, "temperature": 0}
REAL_LENGTH = 60
"""The most tokens of an answer of the real model, which may have much to say."""
INDENT = "    "


class Subject(NamedTuple):
    """A model that the demo talks to. `sample` is a prompt to try, `end` the token that ends a message."""

    model: str
    models_dir: Path | None
    talks: tuple[Talk, Talk]
    options: dict[str, int]
    sample: str
    end: str
    right: str
    """The last line, if every answer was the right one."""


class Measured(NamedTuple):
    """One answered turn: the text, the final line of its stream, and the seconds until its first text."""

    text: str
    final: Answer
    first_s: float


@contextmanager
def demo_store() -> Iterator[Path]:
    """Makes a store with the demo model, its weights as float32, in which a CPU computes fastest."""
    with tempfile.TemporaryDirectory(prefix="mlx-runner-demo-") as name:
        root = Path(name)
        source = root / "source"
        shutil.copytree(WEIGHTS, source)
        weights = mx.load(str(WEIGHTS / "model.safetensors"))
        assert isinstance(weights, dict)
        wide = {key: value.astype(mx.float32) for key, value in weights.items()}
        mx.save_safetensors(str(source / "model.safetensors"), wide, {"format": "mlx"})
        write_store(root / "models", MODEL, source)
        yield root / "models"


def demo_subject(models: Path) -> Subject:
    """Returns the demo model, of this store."""
    talks = Talk.known(CONVERSATIONS[0]), Talk.known(CONVERSATIONS[1])
    right = "Every answer was the expected one."
    return Subject(MODEL, models, talks, GREEDY, CONVERSATIONS[2].prompt(0), END, right)


def real_subject(directory: Path) -> Subject:
    """Returns the real model of this directory; its first answers are the expected ones."""
    first, second = (Talk(title, questions, chat.render) for title, questions in REAL_QUESTIONS.items())
    right = "Every answer without a cache was the one with it."
    options = GREEDY | {"num_predict": REAL_LENGTH}
    return Subject(
        str(directory), None, (first, second), options, chat.render([Message("user", "Hello")]), chat.END, right
    )


@contextmanager
def runner(subject: Subject, cache: str, port: int) -> Iterator[Process]:
    """Spawns a runner as a host does, waits until it is ready, and ends it with SIGINT."""
    arguments = ["--cache", cache]
    with spawn(
        RUNNER, subject.model, models_dir=subject.models_dir, generation=G, port=port, arguments=arguments
    ) as process:
        try:
            seconds = process.wait_ready()
        except LoadError as error:
            sys.exit(f"The runner did not start: {error}")
        print(f"\nRunner with --cache {cache}: ready in {seconds:.1f} s (pid {process.pid}, port {process.port})")
        yield process
        process.send_signal(signal.SIGINT)
        if process.wait(5.0) is None:
            sys.exit("The runner did not end within 5 s of SIGINT.")
        print("\n  ended by SIGINT")


async def hold(client: Client, talk: Talk, turns: Sequence[int], options: dict[str, int]) -> bool:
    """Streams some turns of a talk; returns True if every answer was the expected one."""
    print(f"\n  {talk.title}{', continued' if turns[0] else ''}")
    right = True
    for number in turns:
        print(f"{INDENT}> {talk.questions[number]}\n{INDENT}", end="", flush=True)
        answer = await ask(client, talk.prompt(number), options)
        expected = talk.expected(number, answer.text)
        right &= answer.text == expected
        print(f"\n{INDENT}  {figures(answer)}")
        if answer.text != expected:
            print(f"{INDENT}  WRONG, expected: {expected}")
    return right


async def ask(client: Client, prompt: str, options: dict[str, int]) -> Measured:
    """Streams one answer to the terminal as it arrives."""
    started, first, text = monotonic(), 0.0, ""
    async with client.stream(Request(prompt, options)) as stream:
        async for answer in stream:
            first = first or monotonic() - started
            text += answer.content
            print(answer.content, end="", flush=True)
    return Measured(text, answer, first)


def figures(measured: Measured) -> str:
    """Returns one line of numbers for one turn."""
    final = measured.final
    speed = final.eval_count / max(final.eval_duration, 1) * 1e9
    return (
        f"{final.prompt_eval_count} prompt tokens, {final.prompt_eval_cached_count or 0} cached, "
        f"first text after {measured.first_s * 1e3:.0f} ms, {speed:.0f} tokens/s"
    )


async def converse(process: Process, subject: Subject) -> bool:
    """Holds all talks, interleaved; returns True if every answer was right."""
    async with Client.of(process) as client:
        return all([await hold(client, subject.talks[talk], turns, subject.options) for talk, turns in TURNS])


def serve(subject: Subject, port: int) -> None:
    """Keeps the runner running until it or this program is ended."""
    with runner(subject, "trie", port) as process:
        url = f"http://127.0.0.1:{process.port}"
        prompt = subject.sample.replace("\n", "\\n")
        print(f"""
Try it, from another terminal:

  curl {url}/v1/status
  curl {url}/v1/tokenize -d 'Hello{subject.end}'
  curl -N {url}/completion -d '{{"Prompt":"{prompt}","Options":{{"num_predict":50}}}}'
  curl -N {url}/completion -d '{{"Prompt":"{prompt}","Options":{{"num_predict":50,"stop":["!"]}}}}'
  curl -N {url}/completion -d '{{"Prompt":"{prompt}","Options":{{"num_predict":5}},"Logprobs":true,"TopLogprobs":2}}'

Ctrl-C ends it.""")
        while process.wait(3600.0) is None:
            pass


def main() -> None:
    """Runs the demo; the exit status is 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="keep the runner running and print curl commands to try")
    parser.add_argument("--port", type=int, default=0, help="the runner's port (default: a free one)")
    parser.add_argument(
        "--real", action="store_true", help="talk to a real model of 135 M parameters, fetched once (93 MB)"
    )
    arguments = parser.parse_args()
    port = arguments.port or free_port()
    with ExitStack() as stack:
        if arguments.real:
            subject = real_subject(model_or_exit(parser.prog))
        else:
            subject = demo_subject(stack.enter_context(demo_store()))
        if arguments.serve:
            serve(subject, port)
            return
        right = True
        for cache in ("trie", "none"):
            with runner(subject, cache, port) as process:
                right &= asyncio.run(converse(process, subject))
    print(f"\n{subject.right}" if right else "\nSome answers were WRONG.")
    sys.exit(not right)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
