"""Logs keys of requests that have no effect, and values out of range.

Hosts send neither, so these log lines are for authors of clients. Clients may be hostile: each key is logged only once,
at most `MOST_KEYS` keys are logged, and the lines contain only keys and numbers.
"""

import re
from collections.abc import Iterable

import msgspec

from protocol.request import UNUSED, CompletionRequest, Media, Options
from runner.logs import Log

log = Log(__name__)

_ALIKE = 0.8
"""The least similarity, from 0 to 1, of an unknown key to a known one for the log line to name the latter."""
MOST_KEYS = 64
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
"""Key of another interface, in lower case -> the key of this interface with the same meaning."""
_NAMES = {name.lower(): meant for name, meant in (_MEDIA | _OPTIONS | _KEYS | _MEANT).items()}


class Remarks:
    """Logs each key once. Owner: the event loop."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def log_unknown(self, keys: Iterable[str]) -> None:
        """Logs unknown keys that were not logged before and that no host sends. Each of `keys` is a path."""
        for place in keys:
            key = _NUMBER.sub("[]", place)
            if key.lower() not in _QUIET and self._is_new(key):
                from difflib import get_close_matches  # imported here, since hosts never need it

                nearest = get_close_matches(key.rpartition(".")[2].lower(), _NAMES, n=1, cutoff=_ALIKE)
                meant = {"meant": _NAMES[nearest[0]]} if nearest else {}
                log.warning("an unknown key has no effect", key=key, **meant)

    def log_values(self, found: Iterable[tuple[str, float, str]]) -> None:
        """Logs each key with a value out of range, and the value that replaces that."""
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
