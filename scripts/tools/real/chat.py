"""The prompts of the model, as its own chat template writes them. No MLX here, so that a host can import it."""

from collections.abc import Iterable

BEGIN, END = "<|im_start|>", "<|im_end|>"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message of a chat that has none."""


def render(chat: Iterable[tuple[str, str]]) -> str:
    """Returns the prompt for these messages, each a role and a text, with the opener of the assistant's answer."""
    messages = [*chat]
    if messages and messages[0][0] != "system":
        messages.insert(0, ("system", SYSTEM))
    return "".join(f"{BEGIN}{role}\n{text}{END}\n" for role, text in messages) + f"{BEGIN}assistant\n"
