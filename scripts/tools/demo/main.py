"""Starts the runner on small trained models, as an Ollama host does, and streams talks with them to the terminal.

One of the models remembers what it is told, another one says what is in pictures, and the third one what it hears. The
runner is spawned as a host
spawns it, once with a cache and once without. The demo models come from an Ollama-style store, and their answers are
known; a real model (--real) has to give the same answers without a cache as with it. Exit status 0 only if all of them
were right.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.demo.questions import Talk
from scripts.tools.demo.subjects import (
    HEARING_MODEL,
    MODEL,
    SEEING_MODEL,
    Subject,
    demo_store,
    demo_subject,
    hearing_subject,
    real_subject,
    seeing_subject,
)
from scripts.tools.host.lib import Answer, Client, G, LoadError, Medium, Process, Request, free_port, spawn
from scripts.tools.real.main import model_or_exit

INDENT = "    "


class Measured(NamedTuple):
    """One answered turn: the text, the final line of its stream, and the seconds until its first text."""

    text: str
    final: Answer
    first_s: float


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
        name, place = Path(subject.model).name, f"pid {process.pid}, port {process.port}"
        print(f"\n{name} with --cache {cache}: ready in {seconds:.1f} s ({place})")
        yield process
        process.send_signal(signal.SIGINT)
        if process.wait(5.0) is None:
            sys.exit("The runner did not end within 5 s of SIGINT.")
        print("\n  ended by SIGINT")


async def hold(client: Client, talk: Talk, turns: Sequence[int], subject: Subject) -> bool:
    """Streams some turns of a talk; returns True if every answer was the expected one."""
    print(f"\n  {talk.title}{', continued' if turns[0] else ''}")
    right = True
    for number in turns:
        print(f"{INDENT}> {talk.told(number)}\n{INDENT}", end="", flush=True)
        media = [Medium(each, subject.kind) for each in talk.pictures]
        answer = await ask(client, Request(talk.prompt(number), subject.options, media=media or None))
        expected = talk.expected(number, answer.text)
        right &= answer.text == expected
        print(f"\n{INDENT}  {figures(answer)}")
        if answer.text != expected:
            print(f"{INDENT}  WRONG, expected: {expected}")
    return right


async def ask(client: Client, request: Request) -> Measured:
    """Streams one answer to the terminal as it arrives."""
    started, first, text = monotonic(), 0.0, ""
    async with client.stream(request) as stream:
        async for answer in stream:
            first = first or monotonic() - started
            text += answer.content
            print(answer.content, end="", flush=True)
    return Measured(text, answer, first)


def figures(measured: Measured) -> str:
    final = measured.final
    speed = final.eval_count / max(final.eval_duration, 1) * 1e9
    return (
        f"{final.prompt_eval_count} prompt tokens, {final.prompt_eval_cached_count or 0} cached, "
        f"first text after {measured.first_s * 1e3:.0f} ms, {speed:.0f} tokens/s"
    )


async def converse(process: Process, subject: Subject) -> bool:
    """Holds all talks, interleaved; returns True if every answer was right."""
    async with Client.of(process) as client:
        return all([await hold(client, subject.talks[talk], turns, subject) for talk, turns in subject.turns])


def commands(subject: Subject, url: str, folder: Path) -> Iterator[str]:
    """Yields one command after the other to try a runner at `url`. What is to be shown is written into `folder`."""
    prompt = subject.sample.replace("\n", "\\n")
    ask = f"curl -N {url}/completion -d"
    yield f"curl {url}/v1/status"
    yield f"curl {url}/v1/tokenize -d 'Hello{subject.end}'"
    if subject.shown is None:
        yield f"""{ask} '{{"Prompt":"{prompt}","Options":{{"num_predict":50}}}}'"""
        yield f"""{ask} '{{"Prompt":"{prompt}","Options":{{"num_predict":50,"stop":["!"]}}}}'"""
        yield f"""{ask} '{{"Prompt":"{prompt}","Options":{{"num_predict":5}},"Logprobs":true,"TopLogprobs":2}}'"""
        return
    file = folder / ("picture.png" if subject.kind == "image" else "sound.wav")
    file.write_bytes(subject.shown)
    body = f"""'{{"Prompt":"{prompt}","Options":{{"num_predict":50}},"Media":[{{"id":0,"data":"%s"}}]}}'"""
    yield f"""printf {body} "$(base64 < {file} | tr -d '\\n')" | {ask} @-"""


def serve(subject: Subject, port: int) -> None:
    """Keeps the runner running until it or this program is ended."""
    with tempfile.TemporaryDirectory(prefix="mlx-runner-demo-") as folder, runner(subject, "trie", port) as process:
        tries = "\n".join(f"  {each}" for each in commands(subject, f"http://127.0.0.1:{process.port}", Path(folder)))
        print(f"\nTry it, from another terminal:\n\n{tries}\n\nCtrl-C ends it.")
        while process.wait(3600.0) is None:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="keep the runner running and print curl commands to try")
    parser.add_argument("--port", type=int, default=0, help="the runner's port (default: a free one)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeing", action="store_true", help="talk to the model that sees only")
    which.add_argument("--hearing", action="store_true", help="talk to the model that hears only")
    which.add_argument(
        "--real", action="store_true", help="talk to a real model of 135 M parameters, fetched once (93 MB)"
    )
    arguments = parser.parse_args()
    port = arguments.port or free_port()
    with ExitStack() as stack:
        if arguments.real:
            subjects = [real_subject(model_or_exit(parser.prog))]
        else:
            models = stack.enter_context(demo_store(MODEL, SEEING_MODEL, HEARING_MODEL))
            subjects = [make(models) for make in (demo_subject, seeing_subject, hearing_subject)]
            if arguments.seeing or arguments.hearing:
                subjects = subjects[1:2] if arguments.seeing else subjects[2:]
        if arguments.serve:
            serve(subjects[0], port)
            return
        right = True
        for subject in subjects:
            for cache in ("trie", "none"):
                with runner(subject, cache, port) as process:
                    right &= asyncio.run(converse(process, subject))
    print(f"\n{subjects[0].right}" if right else "\nSome answers were WRONG.")
    sys.exit(not right)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
