"""The clients of one runner, acting at random: they chat, branch, leave, lose patience and send nonsense."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from scripts.tools.host.lib import Client, Completion, Request, StatusError
from scripts.tools.soak.checker import LONGEST_WAIT_S, Checker
from scripts.tools.soak.subject import Subject

_WORDS = (
    *("the", "answer", "and", "hero", "thing", "in", "others", "are", "on", "an", "errand", "when", "it", "rains"),
    *("then", "a", "wind", "from", "north"),
)
_LONGEST_CHARACTERS = 1500
_SYSTEM_WORDS = 60
_SYSTEMS = 3
_TOO_LONG = "7" * 9000  # each digit is a token of its own, to every model here


@dataclass
class Tally:
    """The actions and faults of all clients. `faults` holds one text for each thing that was not as it should be."""

    done: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    """The times of the first and the last line of each answer, by `time.monotonic()`."""
    faults: list[str] = field(default_factory=list)

    @property
    def together(self) -> int:
        """The number of answers that were written while another one was."""
        ordered = sorted(self.spans)
        ends = list(accumulate((end for _, end in ordered), max))
        return sum(
            (number > 0 and ends[number - 1] > start) or (number + 1 < len(ordered) and ordered[number + 1][0] < end)
            for number, (start, end) in enumerate(ordered)
        )


class Visitor:
    """One client with a conversation of its own; all of them share a few system prompts."""

    def __init__(
        self, number: int, seed: int, client: Client, checker: Checker, tally: Tally, subject: Subject
    ) -> None:
        self._subject = subject
        self._random = Random(f"{seed}/{number}")
        self._client = client
        self._checker = checker
        self._tally = tally
        self._systems = [_words(Random(f"{seed}/system {which}"), _SYSTEM_WORDS) for which in range(_SYSTEMS)]
        self._messages: list[str] = []
        """User and assistant in turns, the user first."""
        self._actions: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "chat": (40, self._chat),
            "branch": (12, self._branch),
            "regenerate": (8, self._regenerate),
            "cancel": (12, self._cancel),
            "leave": (8, self._leave),
            "retry": (8, self._retry),
            "crowd": (4, self._crowd),
            "tokenize": (5, self._tokenize),
            "refused": (5, self._be_refused),
        }
        self._restart()

    async def run(self, until: float) -> None:
        names = list(self._actions)
        weights = [weight for weight, _ in self._actions.values()]
        while time.monotonic() < until:
            (name,) = self._random.choices(names, weights)
            try:
                async with asyncio.timeout(LONGEST_WAIT_S):
                    await self._actions[name][1]()
            except TimeoutError:
                self._tally.faults.append(f"{name}: no end after {LONGEST_WAIT_S:.0f} s")
            except Exception as error:
                self._tally.faults.append(f"{name}: {type(error).__name__}: {error}")
                self._restart()
                await asyncio.sleep(0.1)
            self._tally.done[name] += 1

    def _restart(self) -> None:
        self._system = self._random.choice(self._systems)
        self._messages = []

    @property
    def _prompt(self) -> str:
        return self._subject.write(self._system, self._messages)

    def _say(self) -> None:
        """Adds the user's next message; a conversation that has grown too long is left for a new one."""
        if len(self._prompt) > _LONGEST_CHARACTERS:
            self._restart()
        self._messages.append(_words(self._random, self._random.randint(1, 30)))

    def _request(self) -> Request:
        options: dict[str, object] = {"num_predict": self._random.randint(1, 40)}
        if self._random.random() < 0.4:
            options |= {**self._subject.drawing, "seed": self._random.randrange(1000)}
        if self._random.random() < 0.2:
            options |= {"repeat_penalty": 1.3, "repeat_last_n": 32}
        if self._random.random() < 0.7:
            return Request(self._prompt, options, logprobs=True, top_logprobs=2)
        return Request(self._prompt, {"num_predict": options["num_predict"]})

    async def _ask(self, request: Request) -> Completion:
        completion = await self._client.complete(request)
        self._checker.offer(request, completion)
        self._tally.answers += 1
        self._tally.spans.append((completion.arrivals[0], completion.arrivals[-1]))
        self._tally.prompt_tokens += completion.final.prompt_eval_count
        self._tally.cached_tokens += completion.final.prompt_eval_cached_count or 0
        return completion

    async def _chat(self) -> None:
        self._say()
        self._messages.append((await self._ask(self._request())).text)

    async def _branch(self) -> None:
        """Rewrites an earlier message of the user and drops everything after it."""
        turns = len(self._messages) // 2
        self._messages = self._messages[: 2 * self._random.randrange(turns)] if turns else []
        await self._chat()

    async def _regenerate(self) -> None:
        if self._messages:
            self._messages.pop()
            self._messages.append((await self._ask(self._request())).text)

    async def _cancel(self) -> None:
        """Leaves after a few lines. The message stays, as in a host that was interrupted."""
        self._say()
        completion = await self._client.complete(self._request(), cancel_after=self._random.randint(1, 8))
        self._messages.append(completion.text)

    async def _leave(self) -> None:
        """Leaves at any moment, in the queue or in the prefill too."""
        self._say()
        await self._lose_patience(self._request())
        self._messages.append("")

    async def _retry(self) -> None:
        """Loses patience, then asks the same again and waits."""
        self._say()
        request = self._request()
        await self._lose_patience(request)
        self._messages.append((await self._ask(request)).text)

    async def _lose_patience(self, request: Request) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.random() ** 2 * 0.2):
                await self._client.complete(request)

    async def _crowd(self) -> None:
        """Continues the same conversation in several ways at once."""
        self._say()
        await asyncio.gather(*(self._ask(self._request()) for _ in range(3)))
        self._messages.append("")

    async def _tokenize(self) -> None:
        text = self._prompt
        ours, theirs = await self._client.tokenize(text), await self._checker.tokenize(text)
        if ours != theirs:
            self._tally.faults.append(f"tokenize: {len(ours)} ids instead of {len(theirs)}")

    async def _be_refused(self) -> None:
        """Sends requests that must get a 400, a 404 or a 405, and bodies that do not parse."""
        bodies = {b"": 400, b"[]": 400, b'{"Prompt":5}': 400, b'{"Prompt":""}': 400, b'{"Prompt":"a"': 400}
        body, status = self._random.choice([*bodies.items()])
        reply = await self._client.send("POST", "/completion", body)
        method, path, wanted = self._random.choice([("GET", "/nowhere", 404), ("POST", "/v1/status", 405)])
        other = await self._client.send(method, path)
        if (reply.status, other.status) != (status, wanted):
            self._tally.faults.append(f"{body!r} got {reply.status}, {method} {path} got {other.status}")
        try:
            await self._client.complete(Request(_TOO_LONG))
            self._tally.faults.append("a prompt beyond the context was taken")
        except StatusError as error:
            if error.status != 400 or "exceeds the model's maximum context length" not in str(error):
                self._tally.faults.append(f"a prompt beyond the context: {error.status} {error}")


def _words(random: Random, count: int) -> str:
    return " ".join(random.choices(_WORDS, k=count))
