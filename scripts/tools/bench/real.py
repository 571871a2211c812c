"""`scripts/bench real`: a trained model, SmolLM2-135M-Instruct in 4 bits, beside what people would pick for it.

Every server runs at its default settings: `ours` with the directory that `scripts/real-model` makes (93 MB are fetched
once), llama.cpp's server, if --llama-server names one, with the GGUF file it was made from. mlx_lm.server, or Ollama's
own runner, has the same weights on a GPU; on a CPU, where they need seconds for a token of packed or 16-bit weights, it
has them in float32.
All rest while another one is measured; every round has prompts of its own.

start   from the spawn until the first text of an answer to a short prompt
cold    until the first text of the answer to a prompt of 256 tokens that nobody has seen
long    the same for a prompt of 2,000 tokens
again   the same prompt once more
append  its answer and another question behind it
switch  two conversations over one prefix of 200 tokens take turns: the median of four
agents  four conversations whose first answers came at once go on one after the other: the median
users   tokens per second of 1, 4 and 8 answers at once, all together
memory  resident, after all that
"""

import argparse
import asyncio
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
from tokenizers import Tokenizer

from runner.device import device
from scripts.tools import ROOT
from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave
from scripts.tools.bench.servers import (
    OURS,
    PEERS,
    SHORT_TOKENS,
    Endpoint,
    MismeasuredError,
    Server,
    open_endpoint,
    servers,
)
from scripts.tools.host.lib import Process, rss_bytes
from scripts.tools.real.main import FetchError, fetch_gguf, make_model

PROMPT_TOKENS, LONG_TOKENS, PREFIX_TOKENS, STREAM_TOKENS, ANSWER_TOKENS = 256, 2000, 200, 48, 12
"""The lengths of two cold prompts, of a shared prefix, of a timed answer, and of an answer between two turns."""
AGENTS = 4
SPEEDS = {users: f"{users} tokens/s" for users in (1, 4, 8)}
"""By how many users."""
CASES = ("cold", "long", "again", "append", "switch", "agents")
_SWITCHES = 4
_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
_ASK, _ANSWER = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_QUESTIONS = ("Say it in fewer words.", "What matters most in this?", "Who should read it?", "What is missing here?")

CountTokens = Callable[[str], int]
Figures = Mapping[str, float]
"""Of one round of one server: milliseconds to the first text of each case, and tokens per second."""


class Heard(NamedTuple):
    """An answer: its text, the seconds until its first text, the times of all texts, and the tokens after the first."""

    text: str
    first_s: float
    times: Sequence[float]
    later_tokens: int

    @property
    def began(self) -> float:
        return self.times[0]

    @property
    def ended(self) -> float:
        return self.times[-1]


class Conversations:
    """Prompts that nobody has seen, cut from this project's documents with a seed."""

    def __init__(self, seed: int, count: CountTokens) -> None:
        self._random = Random(seed)
        self._count = count
        documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        self._words = " ".join(path.read_text() for path in documents).split()

    def text(self, tokens: int) -> str:
        """Returns a passage of about this number of tokens."""
        start = self._random.randrange(len(self._words) - tokens)
        words = [str(self._random.randrange(10**6)), *self._words[start : start + tokens]]
        while self._count(" ".join(words)) > tokens:
            words.pop()
        return " ".join(words)

    def begin(self, passage: str) -> str:
        return f"{_SYSTEM}<|im_start|>user\nSummarize this text: {passage}{_ANSWER}"

    def go_on(self, prompt: str, answer: str) -> str:
        return f"{prompt}{answer}{_ASK}{self._random.choice(_QUESTIONS)}{_ANSWER}"

    def story(self) -> str:
        number = self._random.randrange(10**6)
        return f"{_SYSTEM}<|im_start|>user\nWrite a long story about a lighthouse with the number {number}.{_ANSWER}"

    async def turn(self, endpoint: Endpoint) -> Figures:
        speeds = {speed: await self._speed(endpoint, users) for users, speed in SPEEDS.items()}
        return {**await self._first_ms(endpoint), **speeds}

    async def _first_ms(self, endpoint: Endpoint) -> Figures:
        prompt = self.begin(self.text(PROMPT_TOKENS))
        cold = await self.hear(endpoint, prompt, ANSWER_TOKENS)
        again = await self.hear(endpoint, prompt, ANSWER_TOKENS)
        long = await self.hear(endpoint, self.begin(self.text(LONG_TOKENS)), ANSWER_TOKENS)
        append = await self.hear(endpoint, self.go_on(prompt, again.text), ANSWER_TOKENS)
        prefix = self.text(PREFIX_TOKENS)
        prompts = [self.begin(f"{prefix} {self.text(PROMPT_TOKENS - PREFIX_TOKENS)}") for _ in range(2)]
        answers = [(await self.hear(endpoint, prompt, ANSWER_TOKENS)).text for prompt in prompts]
        switches = []
        for number in range(_SWITCHES):
            which = number % 2
            prompts[which] = self.go_on(prompts[which], answers[which])
            heard = await self.hear(endpoint, prompts[which], ANSWER_TOKENS)
            answers[which] = heard.text
            switches.append(heard.first_s)
        agents = await self._agents_s(endpoint)
        times = (cold.first_s, long.first_s, again.first_s, append.first_s, median(switches), agents)
        return {case: 1e3 * seconds for case, seconds in zip(CASES, times, strict=True)}

    async def _agents_s(self, endpoint: Endpoint) -> float:
        prompts = [self.begin(self.text(PROMPT_TOKENS)) for _ in range(AGENTS)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.hear(endpoint, prompt, ANSWER_TOKENS)) for prompt in prompts]
        later = [self.go_on(prompt, task.result().text) for prompt, task in zip(prompts, tasks, strict=True)]
        return median([(await self.hear(endpoint, prompt, ANSWER_TOKENS)).first_s for prompt in later])

    async def _speed(self, endpoint: Endpoint, users: int) -> float:
        """Returns the tokens per second of answers written at once, from the first text of all to the last."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.hear(endpoint, self.story(), STREAM_TOKENS)) for _ in range(users)]
        answers = [task.result() for task in tasks]
        seconds = max(each.ended for each in answers) - min(each.began for each in answers)
        return sum(each.later_tokens for each in answers) / seconds

    async def hear(self, endpoint: Endpoint, prompt: str, tokens: int, texts: list[str] | None = None) -> Heard:
        """Asks, and returns the answer, whose `texts` are appended as they come. Raises `MismeasuredError` if none
        came."""
        pieces: list[str] = [] if texts is None else texts
        times = []
        sent = perf_counter()
        async with endpoint.stream(prompt, tokens) as lines:
            async for text in lines:
                times.append(perf_counter())
                pieces.append(text)
        if not times:
            raise MismeasuredError("an answer had no text")
        later = self._count("".join(pieces[1:])) if len(pieces) > 1 else 0
        return Heard("".join(pieces), times[0] - sent, times, later)


LLAMA = "llama.cpp"
BOUNDS = {
    "cold": 0.5,
    "long": 0.5,
    "again": 1.2,
    "append": 0.8,
    "switch": 0.8,
    "agents": 0.8,
    **dict.fromkeys(SPEEDS.values(), 0.9),
}
"""Ours over llama.cpp's: at most for times, at least for speeds."""


class Contender(NamedTuple):
    server: Server
    model: Path


def report(
    turns: int,
    starts: Mapping[str, Sequence[float]],
    found: Mapping[str, Sequence[Figures]],
    resident: Mapping[str, int],
) -> Report:
    """Returns the results by contender: against mlx-lm's server, if it took part. Starts are in seconds, `resident`
    are the bytes at the end."""
    rounds = Rounds(found)
    speeds = [*SPEEDS.values()]
    targets = []
    for peer in filter(found.__contains__, PEERS):
        for case in (*CASES, *speeds):
            ratio = rounds.ratio(OURS, peer, case)
            targets.append(Target(f"{case}, ours over {peer}", ratio, 1.0, most=case in CASES))
    if LLAMA in found:
        for case, bound in BOUNDS.items():
            ratio = rounds.ratio(OURS, LLAMA, case)
            targets.append(Target(f"{case}, ours over {LLAMA}", ratio, bound, most=case in CASES))
        targets.append(Target(f"memory, ours over {LLAMA}", resident[OURS] / resident[LLAMA], 1.1, most=True))
        ratio = median(starts[OURS]) / median(starts[LLAMA])
        targets.append(Target(f"start, ours over {LLAMA}", ratio, 1.2, most=True))
    waits, rates = rounds.rows(CASES, ",.0f"), rounds.rows(speeds)
    rows = [
        (name, f"{1e3 * median(starts[name]):,.0f}", *waits[name], *rates[name], f"{resident[name] / 1e6:,.0f}")
        for name in found
    ]
    columns = ("", "start ms", *(f"{case} ms" for case in CASES), *speeds, "MB")
    return Report(
        targets,
        [Table(f"SmolLM2-135M-Instruct, 4 bits: medians of {turns} rounds", columns, rows)],
        {"turns": turns, "starts_s": starts, "rounds": found, "resident_bytes": resident},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llama-server",
        metavar="COMMAND",
        help="llama.cpp's server, with options: `llama-server --parallel 8 --ctx-size 20480`",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark. Raises ValueError if the options make no sense, or the model cannot be fetched."""
    with asyncio.Runner() as loop, ExitStack() as stack:
        contenders = _contenders(arguments, say, stack)
        tokenizer = Tokenizer.from_file(str(contenders[0].model / "tokenizer.json"))
        conversations = Conversations(arguments.seed, lambda text: len(tokenizer.encode(text).ids))

        def started(contender: Contender) -> float:
            spawned = perf_counter()
            with ExitStack() as ended:
                process = contender.server.start(contender.model, ended)
                endpoint = open_endpoint(contender.server, process, contender.model, ended, loop)
                prompt = conversations.begin(conversations.text(SHORT_TOKENS))
                return loop.run(conversations.hear(endpoint, prompt, 1)).began - spawned

        say("start ...")
        starts = interleave({one.server.name: partial(started, one) for one in contenders}, arguments.turns)
        processes: dict[str, Process] = {}
        rounds: dict[str, Callable[[], Figures]] = {}

        def measured(name: str, endpoint: Endpoint) -> Figures:
            say(f"{name} ...")
            return loop.run(conversations.turn(endpoint))

        for server, model in contenders:
            processes[server.name] = server.start(model, stack)
            endpoint = open_endpoint(server, processes[server.name], model, stack, loop)
            rounds[server.name] = partial(measured, server.name, endpoint)
        found = interleave(rounds, arguments.turns)
        resident = {name: rss_bytes(process.pid) for name, process in processes.items()}
    return report(arguments.turns, starts, found, resident)


def _contenders(arguments: argparse.Namespace, say: Callable[[str], None], stack: ExitStack) -> list[Contender]:
    contenders = []
    try:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        for server in servers(arguments, say, max(SPEEDS), "auto"):
            slow = server.name in PEERS and device() == "cpu"
            model = _in_float32(work / "float32") if slow else make_model()
            contenders.append(Contender(server, server.prepare(model, stack)))
        if arguments.llama_server:
            llama = Server(LLAMA, shlex.split(arguments.llama_server), {}, speaks_openai=True)
            contenders.append(Contender(llama, fetch_gguf(work)))
    except FetchError as error:
        raise ValueError(str(error)) from error
    return contenders


def _in_float32(directory: Path) -> Path:
    shutil.copytree(make_model(packed=False), directory)
    for path in directory.glob("*.safetensors"):
        weights = mx.load(str(path))
        assert isinstance(weights, dict)
        mx.save_safetensors(str(path), {name: array.astype(mx.float32) for name, array in weights.items()})
    return directory
