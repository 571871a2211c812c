"""Renders a chat into one prompt with the model's own chat template, as transformers does, without importing that."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from scripts.tools.host.models import Model
from scripts.tools.host.rendering import Renderer

_SPECIAL = re.compile(r"[a-z_]+_token")
_OPENING, _CLOSING = "<think>", "</think>"

Message = Mapping[str, object]


class ChatTemplate:
    """The chat template of one model; a model without one gets its roles spelled out."""

    def __init__(self, model: Model, renderer: Renderer) -> None:
        self._renderer = renderer
        self._config = model.json("tokenizer_config.json")
        self._sources = _sources(model, self._config)

    @property
    def source(self) -> str | None:
        """None for a model that has no template."""
        return self._sources.get("default")

    @property
    def closing(self) -> str | None:
        """The tag that ends its thinking, if the template knows thinking."""
        return _CLOSING if _CLOSING in (self.source or "") else None

    @property
    def knows_tools(self) -> bool:
        return "tool_use" in self._sources or "tools" in (self.source or "")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, as templates name them."""
        tokens = {}
        for key, value in self._config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if _SPECIAL.fullmatch(key) and isinstance(text, str):
                tokens[key] = text
        return tokens

    async def render(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None, *, think: bool | None = None
    ) -> str:
        """The prompt for the model's next turn. Raises `RenderingError` when the template refuses the chat.

        A BOS at its start is left out where the runner adds it.
        """
        source = self._sources.get("tool_use", self.source) if tools else self.source
        if source is None:
            return _spelled_out(messages)
        given = {} if think is None else {"enable_thinking": think, "thinking": think}
        values = {**self.special_tokens, **given, "messages": messages, "tools": tools or None}
        text = await self._renderer.render(source, {**values, "add_generation_prompt": True})
        bos = self.special_tokens.get("bos_token", "")
        return text.removeprefix(bos) if self._config.get("add_bos_token") is True else text

    @staticmethod
    def after_thinking(prompt: str, thinking: str) -> str:
        """The prompt that goes on behind finished thinking."""
        opening = "" if prompt.rstrip().endswith(_OPENING) else f"{_OPENING}\n"
        return f"{prompt}{opening}{thinking.strip()}\n{_CLOSING}\n\n"

    @staticmethod
    def has_opened(prompt: str) -> bool:
        """Returns True if the answer begins inside the thinking."""
        return prompt.rstrip().endswith(_OPENING)


def _sources(model: Model, config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name; the one that counts is called `default`."""
    of_file = model.text("chat_template.jinja")
    if of_file is not None:
        return {"default": of_file}
    for value in (config.get("chat_template"), model.json("chat_template.json").get("chat_template")):
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            named = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
            sources = {name: text for name, text in named.items() if isinstance(text, str)}
            return {"default": next(iter(sources.values())), **sources} if sources else {}
    return {}


def _spelled_out(messages: Sequence[Message]) -> str:
    turns = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(turns) + "assistant:"
