"""The requests of several agents to one model: a seeded stream, for prefix caches.

    trace = AgentTrace(Workload(seed=1))
    while (ask := trace.next()) is not None:
        trace.answer(None if ask.cancel else serve(ask.prompt, ask.answer_tokens))

A prompt depends on what the model answered before; everything else follows from the seed, whatever the answers are.

The chat template is that of current models: a message is `<s>role\\n` text `<e>\\n`; the prompt ends with the opener of
the assistant, and `<think>\\n` where the agent has the model reason first. Reasoning stays in the history while tool
results come in, and is left out of it from the next message of the user on, as Qwen3's template has it.

What happens, each at random and counted in `AgentTrace.counts`:

* `open`, `restart`: a new conversation under the agent's system prompt, which other agents use too; `restart` also when
  the context is full;
* `user`, `tool`: the history grows by a message of the user or by the result of a tool;
* `edit`: a past message of the user or tool result is changed, and everything after it is dropped. Counted from the
  newest such message, the i-th is chosen with a probability proportional to 0.6^i; the place of the change is uniform
  over its tokens;
* `elide`: an old tool result is cut short to save context while all that follows stays; the message is chosen in the
  same way among those older than the last one, the place of the cut is uniform;
* `regenerate`: the same prompt again, for another answer;
* `retry`: after a cancelled prefill the same prompt again;
* `cancelled`: the prefill is cut short. The agent then retries or changes its last message;
* `dropped reasoning`: a message of the user removes reasoning from the history.

Which agent asks next is skewed: weights 1/rank^skew, so that some return late; and a tool result often follows at once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import NamedTuple

START, END, THINK = 0, 1, 2
"""`<s>`, `<e>` and `<think>`: added special tokens of the imagined vocabulary."""
TURN_TOKENS = frozenset({START, END, THINK})
NEWLINE = 3
ROLES = {"system": 4, "user": 5, "tool": 6, "assistant": 7}
FIRST_WORD = 16
"""Ids from here on are words; models should answer with nothing else."""

_RECENCY = 0.6
_SPREAD = 0.8  # sigma of the logarithm of a message's length
_LONGEST = 8  # times the median
_CANCELLED = 0.07
_RETRIED = 0.6
_TOOL_CALLED = 0.55
_TOOL_ANSWERS_AT_ONCE = 0.5
_OPERATIONS = {"turn": 0.60, "edit": 0.13, "elide": 0.10, "regenerate": 0.12, "restart": 0.05}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The agents, and the amounts. Lengths are in tokens, medians of log-normal distributions, except for the system
    prompts, which all have `system_tokens`. `context_tokens` bounds a prompt, softly."""

    seed: int = 1
    requests: int = 56
    agents: int = 6
    systems: int = 2
    system_tokens: int = 600
    user_tokens: int = 40
    tool_tokens: int = 120
    answer_tokens: int = 16
    context_tokens: int = 4096
    skew: float = 1.2
    vocabulary: int = 4096


class Ask(NamedTuple):
    """One request. `cancel`, if not None, is the share of the prefill it has to compute after which its client is
    gone: it has no answer then. `seed` is for the sampler."""

    number: int
    agent: int
    operation: str
    prompt: list[int]
    answer_tokens: int
    cancel: float | None
    seed: int


@dataclass
class _Message:
    role: str
    text: list[int]
    reasoning: list[int] = field(default_factory=list)


@dataclass
class _Agent:
    number: int
    system: list[int]
    reasons: bool
    messages: list[_Message] = field(default_factory=list)
    calls_tool: bool = False  # the last answer ends with a tool call
    cancelled: bool = False  # the last request did

    @property
    def opener(self) -> list[int]:
        return [*_head("assistant"), *([THINK, NEWLINE] if self.reasons else [])]

    def prompt(self) -> list[int]:
        last_user = max(index for index, message in enumerate(self.messages) if message.role == "user")
        tokens: list[int] = []
        for index, message in enumerate(self.messages):
            kept = bool(message.reasoning) and index > last_user
            tokens += [*self.opener, *message.reasoning] if kept else _head(message.role)
            tokens += [*message.text, END, NEWLINE]
        return tokens + self.opener


class AgentTrace:
    """The stream of requests. Ask for the next one and tell its answer, in turns.

    `counts` says how often each of the things above has happened.
    """

    def __init__(self, workload: Workload) -> None:
        self.counts: Counter[str] = Counter()
        self._workload = workload
        self._random = Random(workload.seed)
        self._writer = Random(self._random.getrandbits(32))
        self._words = range(FIRST_WORD, workload.vocabulary)
        self._frequencies = list(accumulate(1 / (rank + 2) for rank in range(len(self._words))))  # as words have
        systems = [self._text(workload.system_tokens) for _ in range(workload.systems)]
        self._agents = [
            _Agent(number, systems[number % len(systems)], reasons=number % 3 != 2) for number in range(workload.agents)
        ]
        self._weights = [1 / (rank + 1) ** workload.skew for rank in range(workload.agents)]
        self._asked = 0
        self._agent = self._agents[0]
        self._reasoning_tokens = 0
        self._waiting: Ask | None = None

    def next(self) -> Ask | None:
        """The next request, None after the last one. RuntimeError while an answer is missing."""
        if self._waiting is not None:
            raise RuntimeError(f"request {self._waiting.number} has no answer yet")
        if self._asked == self._workload.requests:
            return None
        agent = self._agent = self._choose_agent()
        operation = self._change(agent)
        self._reasoning_tokens = self._length(self._workload.answer_tokens) if agent.reasons else 0
        self._waiting = Ask(
            number=self._asked,
            agent=agent.number,
            operation=operation,
            prompt=agent.prompt(),
            answer_tokens=self._reasoning_tokens + self._length(self._workload.answer_tokens),
            cancel=self._random.uniform(0.1, 1.0) if self._random.random() < _CANCELLED else None,
            seed=self._random.getrandbits(32),
        )
        self._asked += 1
        self.counts[operation] += 1
        return self._waiting

    def answer(self, tokens: Sequence[int] | None) -> None:
        """Takes the model's answer to the last request: as many tokens as it asked for, None if it was cancelled."""
        ask, self._waiting = self._waiting, None
        if ask is None:
            raise RuntimeError("no request waits for an answer")
        if (tokens is None) != (ask.cancel is not None) or len(tokens or ()) not in (0, ask.answer_tokens):
            raise ValueError(f"request {ask.number} asked for {ask.answer_tokens} tokens, cancelled: {ask.cancel}")
        agent = self._agent
        agent.cancelled = tokens is None
        agent.calls_tool = tokens is not None and self._random.random() < _TOOL_CALLED
        if tokens is None:
            self.counts["cancelled"] += 1
            return
        cut = self._reasoning_tokens
        agent.messages.append(_Message("assistant", list(tokens[cut:]), list(tokens[:cut])))

    def _choose_agent(self) -> _Agent:
        if self._agent.calls_tool and self._random.random() < _TOOL_ANSWERS_AT_ONCE:
            return self._agent
        return self._random.choices(self._agents, self._weights)[0]

    def _change(self, agent: _Agent) -> str:
        """Changes the agent's messages before its next request; then the last one is of the user or of a tool."""
        if not agent.messages:
            self._open(agent)
            return "open"
        if agent.cancelled:
            if self._random.random() < _RETRIED:
                return "retry"
            self._edit(agent.messages[-1])
            return "edit"
        operation = self._random.choices(list(_OPERATIONS), list(_OPERATIONS.values()))[0]
        if operation == "restart" or len(agent.prompt()) > self._workload.context_tokens:
            self._open(agent)
            return "restart"
        if operation == "regenerate":
            agent.messages.pop()
            return operation
        if operation == "edit":
            chosen = self._recent([i for i, message in enumerate(agent.messages) if message.role in ("user", "tool")])
            del agent.messages[chosen + 1 :]
            self._edit(agent.messages[chosen])
            return operation
        old_results = [i for i, message in enumerate(agent.messages[:-2]) if message.role == "tool"]
        if operation == "elide" and old_results:
            text = agent.messages[self._recent(old_results)].text
            del text[self._writer.randrange(len(text)) :]
            text += self._text(3)  # "[output shortened]"
            self._grow(agent)
            return operation
        return self._grow(agent)

    def _open(self, agent: _Agent) -> None:
        first = _Message("user", self._text(self._length(self._workload.user_tokens)))
        agent.messages = [_Message("system", agent.system), first]

    def _grow(self, agent: _Agent) -> str:
        role = "tool" if agent.calls_tool else "user"
        if role == "user":
            since = max(index for index, message in enumerate(agent.messages) if message.role == "user")
            self.counts["dropped reasoning"] += any(message.reasoning for message in agent.messages[since:])
        tokens = self._workload.tool_tokens if role == "tool" else self._workload.user_tokens
        agent.messages.append(_Message(role, self._text(self._length(tokens))))
        return role

    def _edit(self, message: _Message) -> None:
        """Replaces some tokens at a random place by others, perhaps none; there is always a change, and a text."""
        before, text = list(message.text), message.text
        start = self._writer.randrange(len(text))
        text[start : start + self._length(6)] = self._text(self._writer.randint(0, 8))
        if not text or text == before:
            text += self._text(1)

    def _recent(self, indices: Sequence[int]) -> int:
        weights = [_RECENCY**age for age in range(len(indices))]
        return self._random.choices(indices[::-1], weights)[0]

    def _length(self, median: int) -> int:
        return max(1, min(_LONGEST * median, round(median * self._random.lognormvariate(0, _SPREAD))))

    def _text(self, tokens: int) -> list[int]:
        return self._writer.choices(self._words, cum_weights=self._frequencies, k=tokens)


def _head(role: str) -> list[int]:
    return [START, ROLES[role], NEWLINE]
