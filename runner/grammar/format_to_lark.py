"""Translates a `Format` into the text of a Lark grammar, which llguidance compiles.

A special token in the answer is matched as a token, all other text by its bytes. The only white space in JSON is one
space after each comma and colon: with free white space, an answer could continue with spaces for ever.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec
from llguidance import regex_to_lark

from protocol.format import (
    AnyText,
    ConstString,
    Format,
    FormatError,
    JsonSchema,
    Lark,
    Node,
    OptionalNode,
    OrNode,
    Regex,
    SequenceNode,
)
from runner.tokenizer.added_tokens import literal_pattern

_SPACING = {"whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ", ", "key_separator": ": "}
OPTIONS_KEY = "x-guidance"
_ASCII_CLASSES = "dw"  # classes such as `\d` that match ASCII only, as in the patterns of JSON schemas
_MOST_WAYS = 64  # the most texts with which the text after an `any_text` may begin
_REGEX_PART = re.compile(r"\\.|\[(?!\^?\])(?:\\.|[^\[\]\\])*\]|\((?!\?)|\(\?(?:P?<\w+>|[imsuU-]*:)|[^\[(\\]", re.DOTALL)
"""Matches an escape, a class, the beginning of a group, or a character; not a class in a class, or flags alone."""


def lark_text(root: Format, special: Mapping[str, int], *, lenient: bool = False, json: str = "") -> str:
    """Returns the text of the grammar of `root`. `special` maps the text of each special token that does not end an
    answer to its id. If `lenient`, keywords that llguidance cannot enforce are left out, unless the options in a schema
    say otherwise. If `json` is not empty, that expression replaces each schema. Raises FormatError if the nodes are in
    an order in which the end of an `any_text` cannot be recognised."""
    if isinstance(root, Lark):
        return root.grammar
    writer = _Writer(special, lenient=lenient, json=json)
    start = writer.node(root, "$", last=True)
    return "\n".join([f"start: {start}", *writer.rules, ""])


class _Writer:
    """Writes the rules of one grammar into `rules`."""

    def __init__(self, special: Mapping[str, int], *, lenient: bool, json: str) -> None:
        self._json = json
        self.rules: list[str] = []
        self._options = {"lenient": lenient}
        self._special = special
        self._names: dict[str, str] = {}

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        """A pattern that finds special tokens in a text. Made on first use, since there may be thousands of them."""
        return literal_pattern(self._special) if self._special else None

    def node(self, node: Node, path: str, *, last: bool) -> str:
        """Returns an expression for `node`, whose place in the format is `path`; `last`: no node follows."""
        match node:
            case SequenceNode(elements):
                return self._sequence(_flat(elements), path, last=last)
            case OrNode(elements):
                if not elements:
                    raise FormatError(f"Format: no element to choose from: give at least one - at `{path}.elements`")
                ways = [self.node(each, f"{path}.elements[{i}]", last=last) for i, each in enumerate(elements)]
                return f"({' | '.join(ways)})"
            case OptionalNode(content):
                return f"({self.node(content, f'{path}.content', last=last)})?"
            case ConstString(value):
                return self._text(value)
            case JsonSchema(schema):
                return self._json or self._named("json", f"%json {_with_options(bytes(schema), self._options, path)}")
            case Regex(pattern):
                return self._named("REGEX", f"/{regex_to_lark(with_unique_ways(pattern), _ASCII_CLASSES)}/")
            case AnyText(excludes):
                if not last:
                    raise FormatError(f"Format: any_text must end the format or its sequence - at `{path}`")
                return self._free(excludes)
        raise AssertionError(node)

    def _sequence(self, elements: Sequence[Node], path: str, *, last: bool) -> str:
        parts = []
        for index, element in enumerate(elements):
            rest = elements[index + 1 :]
            if isinstance(element, AnyText) and rest:
                parts.append(self._free_before(element.excludes, rest, f"{path}.elements[{index}]", last=last))
                break
            parts.append(self.node(element, f"{path}.elements[{index}]", last=last and not rest))
        return f"({' '.join(parts)})" if parts else '""'

    def _free_before(self, excludes: Sequence[str], rest: Sequence[Node], path: str, *, last: bool) -> str:
        """Returns an expression for an `any_text` and the nodes after it. llguidance's lexer matches as much text as it
        can. So the terminal includes the end of the text, and matches lazily: up to the first such end."""
        ways = []
        openings = _openings(rest, path)
        for opener, following in openings:
            if opener is None:
                ways.append(self._free(excludes))
                continue
            if not any(text in opener for text in excludes):
                raise FormatError(f"Format: any_text must exclude what follows it, {opener!r} - at `{path}`")
            after = self._sequence(following, path, last=last) if following else ""
            if self._marks is not None and self._marks.match(opener):
                ways.append(f"{self._free(excludes)} {self._text(opener)} {after}")
            else:
                first = min((each for each, _ in openings if each and opener.startswith(each)), key=len)
                until = self._named("UNTIL", f"{self._any(excludes)}? {_quoted(first)}")
                beyond = self._text(opener.removeprefix(first)) if opener != first else ""
                ways.append(f"{self._marked(excludes)} {self._named('until[lazy]', until)} {beyond} {after}")
        return f"({' | '.join(ways)})"

    def _free(self, excludes: Sequence[str]) -> str:
        return f"{self._marked(excludes)} {self._any(excludes)}?".lstrip()

    def _marked(self, excludes: Sequence[str]) -> str:
        """Returns an expression for an `any_text` up to the last special token in it."""
        ids = [token for text, token in self._special.items() if not any(each in text for each in excludes)]
        return f"({self._any(excludes)}? {_token(*ids)})*" if ids else ""

    def _any(self, excludes: Sequence[str]) -> str:
        """Returns the name of a terminal that matches any valid UTF-8 without the excluded texts."""
        anything = "/(?s:.+)/"
        excluded = [text for text in excludes if text]
        if not excluded:
            return self._named("ANY", anything)
        texts = " | ".join(map(_quoted, excluded))
        everything = self._named("ALL", "/(?s:.*)/")
        with_them = self._named("EXCLUDED", f"{everything} ({texts}) {everything}")
        return self._named("ANY", f"{anything} & ~{with_them}")

    def _text(self, value: str) -> str:
        """Returns an expression for `value`. Where it has the text of a special token, that token must come."""
        parts = []
        at = 0
        for mark in self._marks.finditer(value) if self._marks is not None else ():
            parts += [_quoted(value[at : mark.start()])] if mark.start() > at else []
            parts.append(_token(self._special[mark[0]]))
            at = mark.end()
        parts += [_quoted(value[at:])] if at < len(value) or not parts else []
        return " ".join(parts)

    def _named(self, name: str, body: str) -> str:
        """Returns the name of the rule with this body; adds a new rule. A `name` in capitals makes a terminal."""
        known = self._names.get(name + body)
        if known is None:
            stem, bracket, options = name.partition("[")
            known = self._names[name + body] = f"{stem}_{len(self._names)}"
            self.rules.append(f"{known}{bracket}{options}: {body}")
        return known


def with_unique_ways(regex: str) -> str:
    """Returns `regex` without captures and with each alternative once, or as it is if it has parts that `_REGEX_PART`
    does not match. llguidance panics at alternatives that are equal but for captures, as in `aaa|(a)aa`."""
    parts = _REGEX_PART.findall(regex)
    opened: list[list[list[str]]] = [[[]], [[]]]  # the parts of each alternative, of each group that is still open
    for part in [*parts, ")"]:  # the whole is a group, too
        if part == ")" and 1 < len(opened) < 300:  # llguidance refuses as many groups in each other
            opened[-2][-1] += ["|".join(dict.fromkeys(map("".join, opened.pop()))), part]
        elif part == "|":
            opened[-1].append([])
        else:
            opened[-1][-1].append("(?:" if part[0] == "(" and part[-1] != ":" else part)
            opened += [[[]]] if part[0] == "(" else []
    return opened[0][0][0] if [*map(len, opened[0])] == [2] and "".join(parts) == regex else regex


def _flat(elements: Sequence[Node]) -> list[Node]:
    """Returns `elements` with each nested sequence replaced by its elements."""
    return [flat for each in elements for flat in (_flat(each.elements) if isinstance(each, SequenceNode) else [each])]


_Chain: TypeAlias = "tuple[Node, _Chain] | None"
"""A linked list of nodes. Lists with the same last nodes share them, so that `_openings` visits them once."""


def _openings(rest: Sequence[Node], path: str) -> list[tuple[str | None, list[Node]]]:
    """Returns the texts with which `rest` may begin, and the nodes after each; None for a `rest` without text."""
    chain = _chained(rest, None)
    ways: list[tuple[str | None, list[Node]]] = []
    seen: dict[int, _Chain] = {}  # by id; holding the lists keeps ids unique
    found: set[tuple[str | None, int]] = set()
    ahead = [chain]
    while ahead:
        chain = ahead.pop()
        if id(chain) in seen:
            continue
        seen[id(chain)] = chain
        opener, tail = None, None
        if chain is not None:
            first, tail = chain
            match first:
                case ConstString(value) if value:
                    opener = value
                case ConstString():
                    ahead.append(tail)
                case SequenceNode(elements):
                    ahead.append(_chained(elements, tail))
                case OptionalNode(content):
                    ahead += [tail, (content, tail)]
                case OrNode(elements):
                    ahead += [(element, tail) for element in reversed(elements)]
                case _:
                    raise FormatError(f"Format: only a const_string can end an any_text - at `{path}`")
        if chain is None or opener:
            if (opener, id(tail)) not in found:
                found.add((opener, id(tail)))
                ways.append((opener, [*_unchained(tail)]))
            if len(ways) > _MOST_WAYS:
                raise FormatError(f"Format: more than {_MOST_WAYS} ways to go on after any_text - at `{path}`")
    return ways


def _chained(nodes: Sequence[Node], tail: _Chain) -> _Chain:
    for node in reversed(nodes):
        tail = (node, tail)
    return tail


def _unchained(chain: _Chain) -> Iterator[Node]:
    while chain is not None:
        node, chain = chain
        yield node


def _with_options(schema: bytes, defaults: Mapping[str, object], path: str) -> str:
    """Returns the schema with its options for llguidance, `defaults` for missing ones, and those for white space."""
    try:
        members = {} if schema == b"true" else msgspec.json.decode(schema, type=dict[str, msgspec.Raw])
        options = msgspec.json.decode(members.pop(OPTIONS_KEY, b"{}"), type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise FormatError(f"Format: a JSON schema must be an object: {error} - in `{path}`") from None
    return msgspec.json.encode({OPTIONS_KEY: {**defaults, **options, **_SPACING}, **members}).decode()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token(*ids: int) -> str:
    """Returns an expression for any one of the tokens `ids`, which are in ascending order."""
    spans: list[list[int]] = []
    for token in ids:
        if spans and token == spans[-1][1] + 1:
            spans[-1][1] = token
        else:
            spans.append([token, token])
    return f"<[{','.join(f'{first}-{last}' if last > first else str(first) for first, last in spans)}]>"
