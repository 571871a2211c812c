"""Starts the runner on the demo model, as an Ollama host does, and streams two conversations to the terminal.

The model is written into an Ollama-style store, the runner is spawned as a host spawns it, and every answer is compared
with the one the model is known to give. Exit status 0 only if all of them were right.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import mlx.core as mx

from scripts.tools import ROOT
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.demo.questions import CONVERSATIONS, END, Conversation
from scripts.tools.host.lib import Answer, Client, G, LoadError, Process, Request, free_port, spawn
from scripts.tools.models.store import write_store

MODEL = "demo:latest"
WEIGHTS = ROOT / "scripts" / "demo_model"
TURNS = ((CONVERSATIONS[0], (0, 1)), (CONVERSATIONS[1], (0,)), (CONVERSATIONS[0], (2,)), (CONVERSATIONS[1], (1,)))
"""The conversations in the order in which they are held, and the turns of each."""
GREEDY = {"num_predict": 200, "temperature": 0}
INDENT = "    "


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


@contextmanager
def runner(models: Path, cache: str, port: int) -> Iterator[Process]:
    """Spawns a runner as a host does, waits until it is ready, and ends it with SIGINT."""
    arguments = ["--cache", cache]
    with spawn(RUNNER, MODEL, models_dir=models, generation=G, port=port, arguments=arguments) as process:
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


async def hold(client: Client, conversation: Conversation, turns: Sequence[int]) -> bool:
    """Streams some turns of a conversation; returns True if every answer was the expected one."""
    print(f"\n  {conversation.title}{', continued' if turns[0] else ''}")
    right = True
    for number in turns:
        turn = conversation.turns[number]
        print(f"{INDENT}> {turn.user}\n{INDENT}", end="", flush=True)
        answer = await ask(client, conversation.prompt(number))
        correct = answer.text == turn.answer
        right &= correct
        print(f"\n{INDENT}  {figures(answer)}")
        if not correct:
            print(f"{INDENT}  WRONG, expected: {turn.answer}")
    return right


async def ask(client: Client, prompt: str) -> Measured:
    """Streams one answer to the terminal as it arrives."""
    started, first, text = monotonic(), 0.0, ""
    async with client.stream(Request(prompt, GREEDY)) as stream:
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


async def converse(process: Process) -> bool:
    """Holds all conversations, interleaved; returns True if every answer was right."""
    async with Client.of(process) as client:
        return all([await hold(client, conversation, turns) for conversation, turns in TURNS])


def serve(models: Path, port: int) -> None:
    """Keeps the runner running until it or this program is ended."""
    with runner(models, "trie", port) as process:
        url = f"http://127.0.0.1:{process.port}"
        conversation = CONVERSATIONS[2]
        prompt = conversation.prompt(0).replace("\n", "\\n")
        print(f"""
Try it, from another terminal:

  curl {url}/v1/status
  curl {url}/v1/tokenize -d 'Hello{END}'
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
    arguments = parser.parse_args()
    port = arguments.port or free_port()
    with demo_store() as models:
        if arguments.serve:
            serve(models, port)
            return
        right = True
        for cache in ("trie", "none"):
            with runner(models, cache, port) as process:
                right &= asyncio.run(converse(process))
    print("\nEvery answer was the expected one." if right else "\nSome answers were WRONG.")
    sys.exit(not right)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
