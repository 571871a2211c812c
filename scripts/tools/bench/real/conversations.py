"""Conversations with the real model, as its chat template writes them, and the time that each part of one takes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import median
from time import perf_counter
from typing import NamedTuple

from scripts.tools import ROOT
from scripts.tools.bench.common.requests import MismeasuredError
from scripts.tools.bench.common.servers import Endpoint

PROMPT_TOKENS, PREFIX_TOKENS, STREAM_TOKENS, ANSWER_TOKENS = 256, 200, 48, 12
"""Of a cold prompt, of what two conversations share, of a timed answer, and of an answer between two turns."""
USERS = (1, 4, 8)
CASES = ("cold", "again", "append", "switch")
_SWITCHES = 4
_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
_ASK, _ANSWER = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_QUESTIONS = ("Say it in fewer words.", "What matters most in this?", "Who should read it?", "What is missing here?")

CountTokens = Callable[[str], int]


class Heard(NamedTuple):
    """An answer: its text, the seconds until its first text, and its tokens per second after that."""

    text: str
    first_s: float
    began: float
    ended: float
    later_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """The speed after the first text."""
        return self.later_tokens / (self.ended - self.began)


class Turn(NamedTuple):
    """One round of one server: milliseconds to the first text of each case, and tokens per second for each number of
    users."""

    first_ms: Mapping[str, float]
    tokens_per_s: Mapping[int, float]


class Conversations:
    """Prompts that nobody has seen, cut from this project's documents with a seed."""

    def __init__(self, seed: int, count: CountTokens) -> None:
        self._random = Random(seed)
        self._count = count
        documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        self._words = " ".join(path.read_text() for path in documents).split()

    def text(self, tokens: int) -> str:
        """Returns a passage of about so many tokens."""
        start = self._random.randrange(len(self._words) - tokens)
        words = [str(self._random.randrange(10**6)), *self._words[start : start + tokens]]
        while self._count(" ".join(words)) > tokens:
            words.pop()
        return " ".join(words)

    def begin(self, passage: str) -> str:
        """Returns the prompt of a conversation's first turn."""
        return f"{_SYSTEM}<|im_start|>user\nSummarize this text: {passage}{_ANSWER}"

    def go_on(self, prompt: str, answer: str) -> str:
        """Returns the prompt of the next turn."""
        return f"{prompt}{answer}{_ASK}{self._random.choice(_QUESTIONS)}{_ANSWER}"

    def story(self) -> str:
        """Returns a prompt whose answer is long."""
        number = self._random.randrange(10**6)
        return f"{_SYSTEM}<|im_start|>user\nWrite a long story about a lighthouse with the number {number}.{_ANSWER}"

    async def turn(self, endpoint: Endpoint) -> Turn:
        """Measures one round of a server."""
        return Turn(await self._first_ms(endpoint), {users: await self._speed(endpoint, users) for users in USERS})

    async def _first_ms(self, endpoint: Endpoint) -> Mapping[str, float]:
        prompt = self.begin(self.text(PROMPT_TOKENS))
        cold = await self.hear(endpoint, prompt, ANSWER_TOKENS)
        again = await self.hear(endpoint, prompt, ANSWER_TOKENS)
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
        times = (cold.first_s, again.first_s, append.first_s, median(switches))
        return {case: 1e3 * seconds for case, seconds in zip(CASES, times, strict=True)}

    async def _speed(self, endpoint: Endpoint, users: int) -> float:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.hear(endpoint, self.story(), STREAM_TOKENS)) for _ in range(users)]
        return speed_of([task.result() for task in tasks])

    async def hear(self, endpoint: Endpoint, prompt: str, tokens: int) -> Heard:
        """Asks, and returns the answer. Raises `MismeasuredError` if none came."""
        pieces: list[str] = []
        times = []
        sent = perf_counter()
        async with endpoint.stream(prompt, tokens) as lines:
            async for text in lines:
                times.append(perf_counter())
                pieces.append(text)
        if not times:
            raise MismeasuredError("an answer had no text")
        later = self._count("".join(pieces[1:])) if len(pieces) > 1 else 0
        return Heard("".join(pieces), times[0] - sent, times[0], times[-1], later)


def speed_of(answers: Sequence[Heard]) -> float:
    """Returns the tokens per second of answers that were written at once, from the first text of all to the last."""
    seconds = max(each.ended for each in answers) - min(each.began for each in answers)
    return sum(each.later_tokens for each in answers) / seconds
