"""Log lines about keys without an effect, and about values out of range.

Hosts send neither, so these lines are for authors of clients. Clients may be hostile: each key is logged once, at most
`MOST_KEYS` are, and the lines contain only keys and numbers.
"""

import re
from collections.abc import Iterable

import msgspec

from protocol.request import UNUSED, CompletionRequest, Media, Options
from runner.logs import Log

log = Log(__name__)

_ALIKE = 0.8
"""The least similarity, from 0 to 1, of a misspelt key."""
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
"""Keys of other interfaces -> their names here."""
_NAMES = {name.lower(): meant for name, meant in (_MEDIA | _OPTIONS | _KEYS | _MEANT).items()}


class Remarks:
    """The keys that were logged. Owner: the event loop."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def log_unknown(self, keys: Iterable[str]) -> None:
        """Logs the new keys that no host sends, each after its place."""
        for place in keys:
            key = _NUMBER.sub("[]", place)
            if key.lower() not in _QUIET and self._is_new(key):
                from difflib import get_close_matches  # hosts never need it

                nearest = get_close_matches(key.rpartition(".")[2].lower(), _NAMES, n=1, cutoff=_ALIKE)
                meant = {"meant": _NAMES[nearest[0]]} if nearest else {}
                log.warning("an unknown key has no effect", key=key, **meant)

    def log_values(self, found: Iterable[tuple[str, float, str]]) -> None:
        """Logs keys with a value out of range, and the value that replaces it."""
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
