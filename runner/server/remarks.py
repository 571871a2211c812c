"""Log lines about keys that have no effect, or another one than they say: one for each.

A host sends nothing of the kind, so these lines are for those who wrote a client themselves. Clients may be hostile: a
key is logged once in the life of a runner, a bounded number of keys is, and nothing but keys and numbers.
"""

import re
from collections.abc import Iterable

import msgspec

from protocol.request import UNUSED, CompletionRequest, Media, Options
from runner.logs import Log

log = Log(__name__)

_ALIKE = 0.8
"""The least similarity, from 0 to 1, by which a key is taken for a misspelt one."""
MOST_KEYS = 64
"""The keys that are ever logged."""
_QUIET = {f"options.{name}" for name in UNUSED}
_NUMBER = re.compile(r"\[\d+\]")
_OPTIONS = {field.encode_name: f"Options.{field.encode_name}" for field in msgspec.structs.fields(Options)}
_KEYS = {field.encode_name: field.encode_name for field in msgspec.structs.fields(CompletionRequest)}
_MEDIA = {field.encode_name: f"Media[].{field.encode_name}" for field in msgspec.structs.fields(Media)}
_MEANT = {
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_completion_tokens", "n_predict"), "Options.num_predict"),
    **dict.fromkeys(("parameters", "params", "generation_config", "sampling_params"), "Options"),
    **dict.fromkeys(("images", "image", "audio"), "Media"),
    **dict.fromkeys(("messages", "input", "inputs", "text", "content", "system"), "Prompt"),
    **dict.fromkeys(("response_format", "json_schema", "schema", "grammar"), "Format"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "Options.stop"),
    "repetition_penalty": "Options.repeat_penalty",
    "n_probs": "TopLogprobs",
}
"""Keys of other interfaces -> their names here."""
_NAMES = {name.lower(): meant for name, meant in (_MEDIA | _OPTIONS | _KEYS | _MEANT).items()}


class Remarks:
    """The keys that were logged. Owner: the event loop."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def unknown(self, keys: Iterable[str]) -> None:
        """Logs the keys, each with its place before it, that are new and that no host sends."""
        for place in keys:
            key = _NUMBER.sub("[]", place)
            if key.lower() not in _QUIET and self._is_new(key):
                from difflib import get_close_matches  # which no host needs

                nearest = get_close_matches(key.rpartition(".")[2].lower(), _NAMES, n=1, cutoff=_ALIKE)
                meant = {"meant": _NAMES[nearest[0]]} if nearest else {}
                log.warning("an unknown key has no effect", key=key, **meant)

    def values(self, found: Iterable[tuple[str, float, str]]) -> None:
        """Logs the keys with a value that means nothing, and the value taken instead."""
        for key, value, instead in found:
            if self._is_new(key):
                log.warning("a value is out of range", key=key, value=value, instead=instead)

    def _is_new(self, key: str) -> bool:
        if key in self._known or len(self._known) >= MOST_KEYS:
            return False
        self._known.add(key)
        if len(self._known) == MOST_KEYS:
            log.warning("further keys are not logged", keys=MOST_KEYS)
        return True
