"""Parses Ollama's model names (docs/internals/store.md, 1.2)."""

import re
from typing import NamedTuple

from runner.errors import ModelError

DEFAULT_HOST = "registry.ollama.ai"
PUBLIC_HOST = "ollama.com"
"""The default host's name in the store of Ollama 0.40."""
PUBLIC_HOSTS = (DEFAULT_HOST, PUBLIC_HOST)
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
_HUB = re.compile(
    r"(?:https?://)?((?:www\.)?(?:huggingface|hf)\.co/)?"
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::latest|/(?:tree|blob|resolve)/.*)?/?"
)
_DIGEST = re.compile(r"(?:sha256-)?([0-9a-f]{12,64})")

_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}


class ModelName(NamedTuple):
    """A complete model name. If it is valid, a path made of its parts stays inside the store."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def short(self) -> str:
        """The name as people write it: without the default host and namespace."""
        text = f"{self.host}/{self.namespace}/{self.model}:{self.tag}"
        return text.removeprefix(f"{DEFAULT_HOST}/").removeprefix(f"{DEFAULT_NAMESPACE}/")

    @property
    def is_public(self) -> bool:
        """True if the host is Ollama's own registry, by either of the names in PUBLIC_HOSTS."""
        return self.host.lower() in PUBLIC_HOSTS

    @property
    def digest(self) -> str:
        """The 12 to 64 hexadecimal digits of a blob, if the name stands for a blob; empty for any other name."""
        found = _DIGEST.fullmatch(self.model.lower())
        is_bare = self.is_public and (self.namespace.lower(), self.tag.lower()) == (DEFAULT_NAMESPACE, DEFAULT_TAG)
        return found[1] if found and is_bare else ""

    @property
    def folded(self) -> tuple[str, ...]:
        """A key for comparing names: equal for names that differ only in case or in the name of Ollama's registry."""
        name = self._replace(host=DEFAULT_HOST) if self.is_public else self
        return tuple(part.casefold() for part in name)

    def is_valid(self) -> bool:
        return all(_PARTS[field].fullmatch(part) for field, part in zip(self._fields, self, strict=True))


def hub_advice(text: str) -> str:
    """Returns advice if `text` is, or may be, a name or an address of a Hugging Face model; else an empty text."""
    found = _HUB.fullmatch(text)
    if found is None:
        return ""
    which = "it is a model of Hugging Face" if found[1] else f"if {found[2]} is a Hugging Face id"
    return f"{which}: download it with `hf download {found[2]} --local-dir DIR`, then --model DIR"


def parse_model_name(text: str) -> ModelName:
    """Parses `[scheme://][host/][namespace/]model[:tag]`; a colon before the last slash belongs to the host's port.

    Raises ModelError for anything else, including `..` and `model@digest`.
    """
    _, _, bare = text.rpartition("://")
    head, slash, last = bare.rpartition("/")
    model, colon, tag = last.partition(":")
    parts = [*(head.split("/") if slash else ()), model]
    if len(parts) <= 3 and (tag or not colon):
        defaults = (DEFAULT_HOST, DEFAULT_NAMESPACE)
        name = ModelName(*[*defaults[: 3 - len(parts)], *parts, tag or DEFAULT_TAG])
        if name.is_valid():
            return name
    advice = f"; {hub}" if (hub := hub_advice(text)) else ""
    raise ModelError(f"read manifest: invalid model name {text!r}: want [host/][namespace/]model[:tag]{advice}")
