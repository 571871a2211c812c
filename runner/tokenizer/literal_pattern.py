"""Builds a regular expression that finds the leftmost occurrence of many texts, and there the longest."""

import re
from collections.abc import Iterable

_END = ""
_Node = dict[str, "_Node"]


def literal_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Compiles one or more non-empty `texts`.

    Common prefixes are factored out: a plain alternation would try thousands of texts at every `<`.
    """
    root: _Node = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_expression(root))


def _expression(node: _Node) -> str:
    branches = []
    for character, following in node.items():
        if character == _END:
            continue
        text = character
        while len(following) == 1:  # no choice: go on without another level
            ((character, following),) = following.items()
            text += character
        branches.append(re.escape(text) + _expression(following))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
