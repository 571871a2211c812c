"""Situations of agents, chats and retrieval, from a seed: what they ask, and when.

An agent's prompt has four layers: tools and system, repository, opened files, history. Messages are rendered as Qwen's
template does it, which drops the thinking of all tasks before the present one. Sessions overlap in time: each goes on a
few seconds after its tool has ended, or when its user has thought.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from scripts.tools.bench.traces.form import FIRST, TURN, Request

SYSTEM, USER, ASSISTANT, LINE, THINK = range(TURN + 1, TURN + 6)
_SECOND, _MINUTE = 1e3, 60e3


class Message(NamedTuple):
    role: int
    content: Sequence[int]
    thinking: Sequence[int] = ()
    is_task: bool = False


class World:
    """The common state of all sessions of a trace: chance, words that were never said, and the requests so far."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        """Texts are `scale` times as long."""
        self.random = Random(seed)
        self.requests: list[Request] = []
        self._scale = scale
        self._next = FIRST

    def words(self, low: float, high: float | None = None) -> list[int]:
        """Returns a text whose tokens are in no other text."""
        count = max(1, round(self._scale * self.random.uniform(low, high or low)))
        self._next += count
        return [*range(self._next - count, self._next)]

    def skewed(self, low: float, high: float) -> list[int]:
        """Returns a text that is mostly short, and seldom long."""
        return self.words(low + (high - low) * self.random.random() ** 3)

    def scaled(self, tokens: int) -> float:
        return self._scale * tokens

    def pause_ms(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random() ** 3


def rendered(messages: Sequence[Message], thinks: bool) -> list[int]:
    """Returns a prompt, which ends where the answer begins."""
    last = max((at for at, each in enumerate(messages) if each.is_task), default=0)
    tokens: list[int] = []
    for at, each in enumerate(messages):
        thinking = [THINK, LINE, *each.thinking] if each.thinking and at > last else []
        tokens += [TURN, each.role, LINE, *thinking, *each.content, TURN, LINE]
    return [*tokens, TURN, ASSISTANT, LINE, *([THINK, LINE] if thinks else [])]


class Session:
    """A conversation, whose next message comes at `at_ms`."""

    def __init__(
        self, world: World, name: str, system: Sequence[int], *, at_ms: float = 0.0, thinks: bool = True
    ) -> None:
        self.world, self.name, self.at_ms, self.thinks = world, name, at_ms, thinks
        self.messages = [Message(SYSTEM, system)]

    def ask(self, answer: Sequence[int], thinking: tuple[int, int] = (40, 900)) -> Message:
        """Asks for an answer to the messages, of which it is none yet. Returns it."""
        said = Message(ASSISTANT, answer, self.world.skewed(*thinking) if self.thinks else ())
        prompt = rendered(self.messages, self.thinks)
        request = Request(self.at_ms, self.name, prompt, [*said.thinking, *answer])
        self.world.requests.append(request)
        self.at_ms = request.end_ms
        return said

    def wait(self, low: float, high: float) -> None:
        self.at_ms += self.world.pause_ms(low, high)


class Agent(Session):
    """A coding agent: a task of its user is a loop of tool calls."""

    tool = (200, 4000)
    calls = (4, 14)
    limit: int | None = None
    """The tokens from which on the history is summarised."""

    def task(self, files: Sequence[int] = ()) -> None:
        words = self.world.words
        self.messages.append(Message(USER, [*files, *words(20, 400)], is_task=True))
        for _ in range(self.world.random.randint(*self.calls)):
            self.step(words(40, 300))
            self.wait(_SECOND, 20 * _SECOND)
            self.messages.append(Message(USER, self.world.skewed(*self.tool)))
        self.step(words(100, 600))
        self.wait(30 * _SECOND, 10 * _MINUTE)

    def step(self, answer: Sequence[int]) -> None:
        words = self.world.words
        if self.limit and len(rendered(self.messages, self.thinks)) > self.world.scaled(self.limit):
            self.messages.append(Message(USER, words(300), is_task=True))
            summary = self.ask(words(800, 2000))
            self.messages = [self.messages[0], Message(USER, summary.content, is_task=True), *self.messages[-4:-1]]
        self.messages.append(self.ask(answer))


def agent(world: World, tasks: int = 5) -> None:
    """Two agents in one repository, one a little after the other; the first goes on an hour later, in a new session."""
    tools, repository = world.words(11_000), world.words(3000)
    first = Agent(world, "agent", [*tools, *repository])
    first.task(world.words(2000, 6000))
    second = Agent(world, "second agent", [*tools, *repository], at_ms=first.at_ms)
    second.task(world.words(2000, 6000))
    for each in [first, second] * (tasks - 1):
        each.task()
    again = Agent(world, "agent after a restart", (), at_ms=first.at_ms + 60 * _MINUTE)
    again.messages = first.messages
    again.task()


def long_task(world: World) -> None:
    """A task of 50 calls, and two more: the prompt of the second drops the thinking of all 50."""
    one = Agent(world, "long task", world.words(14_000))
    one.tool, one.calls = (200, 2500), (50, 50)
    one.task()
    one.calls = (8, 8)
    one.task()
    one.task()


def compaction(world: World, tasks: int = 14) -> None:
    """Summarises its history whenever it has 48,000 tokens."""
    one = Agent(world, "compaction", world.words(12_000))
    one.limit, one.tool = 48_000, (400, 6000)
    for _ in range(tasks):
        one.task()


def subagents(world: World, rounds: int = 6) -> None:
    """Starts two or three agents at once after each task, with its own system prompt and tools."""
    system = world.words(14_000)
    main = Agent(world, "main", system, thinks=False)
    for number in range(rounds):
        main.task()
        helpers = [
            Agent(world, f"helper {number}.{each}", system, at_ms=main.at_ms + each * _SECOND, thinks=False)
            for each in range(world.random.choice([2, 3]))
        ]
        for each in helpers:
            each.calls = (5, 9)
            each.task()
        main.at_ms = max(each.at_ms for each in helpers)


def retries(world: World, chats: int = 8, turns: int = 12) -> None:
    """Answers are asked for again, messages are edited, and earlier versions go on."""
    random, at_ms = world.random, 0.0
    system = world.words(400)

    def asked(chat: Session, versions: list[list[Message]], messages: list[Message], times: int) -> list[Message]:
        chat.messages = messages
        for _ in range(times):
            answer = chat.ask(world.words(100, 900), (50, 1500))
            chat.wait(5 * _SECOND, 2 * _MINUTE)
        versions.append([*messages, answer])
        return versions[-1]

    for number in range(chats):
        chat = Session(world, f"retries {number}", system, at_ms=at_ms)
        versions = [chat.messages]
        for _ in range(turns):
            earlier = random.choice(versions[-2:]) if random.random() < 0.25 else versions[-1]
            messages = [*earlier, Message(USER, world.skewed(20, 1500), is_task=True)]
            asked(chat, versions, messages, random.choice([1, 1, 1, 2, 3]))
            if random.random() < 0.25 and len(messages) > 3:
                kept = messages[: len(messages) - random.choice([1, 1, 3])]
                asked(chat, versions, [*kept, Message(USER, world.skewed(20, 800), is_task=True)], 1)
        at_ms = chat.at_ms


def chats(world: World, users: int = 4, turns: int = 20) -> None:
    """Take turns; each turn drops the thinking of the last."""
    system = world.words(300)
    for user in range(users):
        chat = Session(world, f"chat {user}", system, at_ms=user * _MINUTE)
        for _ in range(turns):
            chat.messages.append(Message(USER, world.skewed(15, 1500), is_task=True))
            chat.messages.append(chat.ask(world.words(100, 800), (100, 2000)))
            chat.wait(5 * _SECOND, 10 * _MINUTE)


def retrieval(world: World, questions: int = 50) -> None:
    """Six of forty documents, the first ones more often, for each question; then one to three questions about them."""
    random = world.random
    system, documents = world.words(500), [world.words(500, 1100) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    at_ms = 0.0
    for number in range(questions):
        chosen: dict[int, None] = {}
        while len(chosen) < 6:
            chosen.update(dict.fromkeys(random.choices(range(len(documents)), weights)))
        found = [token for each in chosen for token in documents[each]]
        chat = Session(world, f"question {number}", system, at_ms=at_ms, thinks=False)
        for _ in range(random.choice([1, 1, 2, 3])):
            chat.messages.append(Message(USER, [*found, *world.words(15, 80)], is_task=True))
            chat.messages.append(chat.ask(world.words(80, 400)))
            chat.wait(5 * _SECOND, _MINUTE)
            found = []
        at_ms = chat.at_ms


def mixed(world: World) -> None:
    """Has all of these at once, and fewer of each."""
    agent(world, 1)
    subagents(world, 2)
    chats(world, 2, 15)
    retrieval(world, 12)
    compaction(world, 3)
    retries(world, 2)


SITUATIONS: Mapping[str, Callable[[World], None]] = {
    "agent": agent,
    "long-task": long_task,
    "compaction": compaction,
    "subagents": subagents,
    "retries": retries,
    "chats": chats,
    "retrieval": retrieval,
    "mixed": mixed,
}


def generate(situation: str, seed: int, scale: float = 1.0) -> list[Request]:
    """Returns the requests of a situation in order of time: the same for the same seed."""
    world = World(seed, scale)
    SITUATIONS[situation](world)
    return sorted(world.requests, key=lambda each: each.at_ms)


def edited(seed: int, place: int) -> list[Request]:
    """Returns a conversation of 42 messages that has grown turn by turn, and a last request in which the message with
    this number, from 0 on, is another one from its 200th token on."""
    world = World(seed)
    chat = Session(world, "edited", world.words(4000), thinks=False)
    for _ in range(21):
        chat.messages.append(Message(USER, world.words(1300), is_task=True))
        chat.messages.append(chat.ask(world.words(500)))
    message = chat.messages[place]
    chat.messages[place] = message._replace(content=[*message.content[:200], *world.words(300)])
    chat.messages.pop()
    chat.ask(world.words(50))
    return world.requests
