"""A chat's answer as a host delivers it: thinking told from content, structured output in two passes.

docs/internals/wire.md, 8.4.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from scripts.tools.host.lib.answers import Answer
from scripts.tools.host.lib.client import Client
from scripts.tools.host.lib.requests import Request, wire_format

State = Literal["opening", "thinking starts", "thinking", "content starts", "content"]


class Thought(NamedTuple):
    """One piece of text, told apart as thinking or content."""

    thinking: str
    content: str


class ThinkingParser:
    """Fed with text as it comes; whitespace around the tags goes, half a tag is held back."""

    def __init__(self, opening: str = "<think>", closing: str = "</think>", *, opened: bool = False) -> None:
        """`opened` when the prompt already ends with the opening tag."""
        self._opening = opening
        self._closing = closing
        self._state: State = "thinking starts" if opened else "opening"
        self._held = ""

    def add(self, text: str) -> Thought:
        """Returns the pieces that are certain by now."""
        held, self._held = self._held + text, ""
        if self._state == "opening":
            bare = held.lstrip()
            if self._opening.startswith(bare):
                if bare != self._opening:
                    self._held = held
                    return Thought("", "")
            elif not bare.startswith(self._opening):
                self._state = "content"
                return Thought("", held)
            held = bare.removeprefix(self._opening)
            self._state = "thinking starts"
        if self._state == "thinking starts":
            held = held.lstrip()
            if not held:
                return Thought("", "")
            self._state = "thinking"
        thinking = ""
        if self._state == "thinking":
            thinking, closed, held = held.partition(self._closing)
            if not closed:
                thinking, self._held = self._without_tag_start(thinking)
                return Thought(thinking, "")
            self._state = "content starts"
        if self._state == "content starts":
            held = held.lstrip()
            if held:
                self._state = "content"
        return Thought(thinking, held)

    def _without_tag_start(self, text: str) -> tuple[str, str]:
        """Splits off an end that may become the closing tag."""
        longest = min(len(text), len(self._closing) - 1)
        size = next((size for size in range(longest, 0, -1) if text.endswith(self._closing[:size])), 0)
        return text[: len(text) - size], text[len(text) - size :]


CANCELLED = "context canceled"


class Part(NamedTuple):
    """One piece of an answer; `answer` is the line it came with, with the counters that the user sees."""

    thinking: str
    content: str
    answer: Answer


@dataclass(frozen=True)
class Thinking:
    """A model's way of thinking: its tags, and the prompt that goes on after finished thinking."""

    again: Callable[[str], str]
    """Takes the thinking so far; its result is the second prompt."""
    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False
    """True if the prompt ends with the opening tag."""

    def parser(self) -> ThinkingParser:
        return ThinkingParser(self.opening, self.closing, opened=self.opened)


async def parts(
    client: Client, request: Request, thinking: Thinking | None = None, *, user_format: object = None
) -> AsyncGenerator[Part, None]:
    """The answer to `request`; a `user_format` sets its `format` as the client's generation does.

    A thinking model that is asked for a format runs without one until its content begins, in every generation that
    takes two passes, even if that generation can send no format at all. Then the connection is closed and the second
    request carries the finished thinking. What was captured of the runner's output replaces the text of that
    cancellation, which the host no longer knows then: it raises `StreamError`, as for any other failure. Whoever
    leaves early closes this generator, and with it the connection.
    """
    generation = client.generation
    final = request
    if user_format is not None:
        closings: Sequence[str] = [thinking.closing] if thinking else []
        final = replace(request, format=wire_format(user_format, generation, closings))
    first: Answer | None = None
    if thinking and user_format is not None and generation.two_passes:
        thought = ""
        parser = thinking.parser()
        async with aclosing(_parts(client, replace(request, intermediate_metrics=True), parser)) as passing:
            async for part in passing:
                first = part.answer
                thought += part.thinking
                if thought and part.content:
                    if part.thinking:
                        yield Part(part.thinking, "", Answer())
                    break
                if part.answer.done:
                    yield part
                    return
                yield part._replace(answer=Answer(logprobs=part.answer.logprobs))
            else:
                return
        failure = client.captured_or(CANCELLED)
        if CANCELLED not in str(failure):
            raise failure
        final = replace(final, prompt=thinking.again(thought))
        thinking = None
    async for part in _parts(client, final, thinking.parser() if thinking else None):
        folds = first is not None and part.answer.done and "IncludeIntermediateMetrics" in generation.request_keys
        yield part._replace(answer=_folded(first, part.answer)) if first and folds else part


async def _parts(client: Client, request: Request, parser: ThinkingParser | None) -> AsyncGenerator[Part, None]:
    async with client.stream(request) as stream:
        async for answer in stream:
            thinking, content = parser.add(answer.content) if parser else ("", answer.content)
            if thinking or content or answer.done or answer.logprobs or not parser:
                yield Part(thinking, content, answer)


def _folded(first: Answer, second: Answer) -> Answer:
    """The counters of both passes: the second prefill counts as time of generation."""
    return replace(
        second,
        prompt_eval_count=first.prompt_eval_count,
        prompt_eval_cached_count=first.prompt_eval_cached_count,
        prompt_eval_duration=first.prompt_eval_duration,
        eval_count=first.eval_count + second.eval_count,
        eval_duration=first.eval_duration + second.prompt_eval_duration + second.eval_duration,
    )
