"""Parses the regular expressions of JSON schemas, which are those of ECMA-262 with the modifiers of 2025.

A pattern is first read as if it had the flag `u`, as JSON Schema recommends. If that fails, or if the pattern spells
half of a surrogate pair, the older grammar without the flag (Annex B) is used. In both, a character is a code point.

Two forms of Python that are invalid in ECMA-262 are accepted, since schemas made from Python types have them: flags for
the whole pattern at its start, as in `(?i)`, and named groups as in `(?P<name>...)`.
"""

import re
from typing import NamedTuple, NoReturn

from runner.grammar.patterns.charsets import (
    CLASSES,
    DOT,
    EVERY,
    PROPERTY,
    WORD,
    Spans,
    astral,
    complement,
    union,
    with_cases,
)
from runner.grammar.patterns.nodes import NEVER, NOTHING, Back, Chars, Edge, Look, Node, alt, is_plain, repeat, seq

_MOST_DEPTH = 60
_MOST_TIMES = 10**9
_SYNTAX = frozenset("^$\\.*+?()[]{}|")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NAME_ESCAPE = re.compile(r"\\u(?:\{([0-9A-Fa-f]{1,8})\}|([0-9A-Fa-f]{4}))")
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_MODIFIERS = re.compile(r"([ims]*)(-?)([ims]*):")
_LOOK = re.compile("<?[=!]")
_NAMED = re.compile("P?<")
_GROUPS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|(\((?!\?)|\(\?P?<(?![=!])([^>]*))", re.DOTALL)
"""Matches an escape, a class, or the beginning of a capturing group with its name, if it has one."""
_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]+)(?:(,)([0-9]*))?\})\??")
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_REFERENCE = re.compile("[1-9][0-9]*")
_NUL = re.compile("0(?![0-9])")
_OCTAL = re.compile("[0-3][0-7]{0,2}|[4-7][0-7]?")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_LONG_CODE = re.compile(r"u\{0*([0-9A-Fa-f]{1,6})\}")
_LETTER = re.compile("[A-Za-z]")
_LETTER_IN_CLASS = re.compile("[A-Za-z0-9_]")


class PatternError(ValueError):
    """An invalid pattern. The message says why it is invalid, and where."""


class PatternDepthError(Exception):
    """A pattern whose groups are nested too deep to be read."""


class _HalvesError(Exception):
    """The pattern spells half of a surrogate pair."""


class Pattern(NamedTuple):
    """A parsed pattern, and its groups by number and by name."""

    node: Node
    groups: dict[int | str, Node]
    doubtful: bool
    """True if the pattern is valid only without the flag `u`, but its `\\p{...}` is read as with the flag."""


def parse_pattern(text: str) -> Pattern:
    """Parses a pattern. Raises PatternError if the text is not a regular expression, and PatternDepthError if groups
    are nested deeper than 60 levels."""
    try:
        return _Parser(text, unicode=True).pattern()
    except (PatternError, _HalvesError):
        return _Parser(text, unicode=False).pattern()


class _Parser:
    def __init__(self, text: str, *, unicode: bool) -> None:
        self._text = text
        self._at = 0
        self._unicode = unicode
        self._depth = 0
        self._behind = 0
        self._flags = frozenset[str]()
        self._groups: dict[int | str, Node] = {}
        self._count = 0
        groups = [found for found in _GROUPS.finditer(text) if found[1]]
        self._captures, self._names = len(groups), {_spelled(found[2]) for found in groups if found[2] is not None}
        self._named = unicode or bool(self._names)
        self._taken = frozenset[str]()
        """The names of groups that may match together with the next part, where no group may use them again."""
        self._doubtful = False

    def pattern(self) -> Pattern:
        if whole := _FLAGS.match(self._text):
            self._flags, self._at = frozenset(whole[1]), whole.end()
        node = self._disjunction()
        if self._at < len(self._text):
            self._refuse("unmatched `)`")
        return Pattern(node, self._groups, self._doubtful)

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._refuse("unexpected end")
        self._at += 1
        return self._text[self._at - 1]

    def _refuse(self, why: str) -> NoReturn:
        raise PatternError(f"{why} at character {self._at + 1}")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Returns the match of `pattern` at the present position, and moves behind it."""
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _disjunction(self) -> Node:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise PatternDepthError
        before = after = self._taken
        options = [self._alternative()]
        while self._take("|"):
            after, self._taken = after | self._taken, before
            options.append(self._alternative())
        self._taken |= after
        self._depth -= 1
        return alt(options) if len(options) > 1 else options[0]

    def _alternative(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            item = self._term()
            before = items[-1] if items else None
            if isinstance(item, Chars) and isinstance(before, Chars) and not self._unicode:
                joined = astral(before.spans, item.spans)
                item = Chars(joined) if joined else item
                items[-1:] = [] if joined else [before]
            items.append(item)
        return seq(items)

    def _term(self) -> Node:
        start = self._at
        char = self._next()
        if char in "^$":
            return Edge(char, "m" in self._flags)
        if char == "\\" and self._text[self._at : self._at + 1] in ("b", "B"):
            return Edge(self._next())
        if char == "(":
            atom, look = self._group()
            if look and (self._unicode or look.startswith("<")):
                return atom
        elif char == ".":
            atom = Chars(EVERY if "s" in self._flags else DOT)
        elif char == "[":
            atom = self._class()
        elif char == "\\":
            atom = self._atom_escape()
        elif char in "*+?{}]" and (self._unicode or _QUANTIFIER.match(self._text, start)):
            self._at = start
            self._refuse(f"nothing to repeat before `{char}`" if char in "*+?{" else f"unmatched `{char}`")
        else:
            atom = self._chars(((ord(char), ord(char)),))
        return self._quantified(atom)

    def _quantified(self, atom: Node) -> Node:
        found = self._match(_QUANTIFIER)
        if found is None:
            if self._unicode and self._peek("{"):
                self._refuse("incomplete quantifier")
            return atom
        least, most = _TIMES[found[1]] if found[1] else (_number(found[2]), None)
        if found[4] or not (found[1] or found[3]):
            most = _number(found[4] or found[2])
            if least > most:
                self._at = found.start()
                self._refuse("numbers out of order in the quantifier")
        return repeat(atom, least, most if most is None or most < _MOST_TIMES else None)

    def _group(self) -> tuple[Node, str]:
        """Returns a group and "", or a look and the characters after its `(?`, such as `<=`."""
        start = self._at
        name, look, flags = "", "", self._flags
        captures = not self._take("?")
        if captures:
            pass
        elif found := self._match(_LOOK):
            look = found[0]
        elif self._match(_NAMED):
            name, captures = self._name(), True
            if name in self._taken:
                self._refuse(f"a second group {name}")
            self._taken |= {name}
        else:
            self._flags = self._modifiers()
        self._count += captures
        number = self._count
        self._behind += look.startswith("<")
        node = self._disjunction()
        self._behind -= look.startswith("<")
        self._flags = flags
        if not self._take(")"):
            self._at = start - 1
            self._refuse("unterminated group")
        if captures:
            self._groups[number] = node
        if name:
            self._groups[name] = alt([self._groups.get(name, NEVER), node])
        if look and is_plain(node):
            return Edge(look, spans=node.spans), look
        return Look(node, look.startswith("<"), look.endswith("!")) if look else node, look

    def _modifiers(self) -> frozenset[str]:
        found = self._match(_MODIFIERS)
        both = found[1] + found[3] if found else ""
        if not found or len({*both}) < len(both) or (found[2] and not both):
            self._refuse("invalid group")
        return self._flags.union(found[1]).difference(found[3])

    def _name(self) -> str:
        end = self._text.find(">", self._at)
        name = _spelled(self._text[self._at : max(end, self._at)])
        if not name.replace("$", "_").replace("\u200c", "_").replace("\u200d", "_").isidentifier():
            self._refuse("invalid group name")
        self._at = end + 1
        return name

    def _atom_escape(self) -> Node:
        if digits := self._match(_REFERENCE):
            if (number := _number(digits[0])) <= self._captures:
                return self._back(number)
            self._at = digits.start()
            if self._unicode:
                self._refuse(f"reference to group {digits[0]}, which is not there,")
        if self._named and self._take("k"):
            if not self._take("<"):
                self._refuse("invalid group reference")
            name = self._name()
            if name not in self._names:
                self._refuse(f"reference to group {name}, which does not exist,")
            return self._back(name)
        found = self._escape(in_class=False)
        return self._chars(((found, found),)) if isinstance(found, int) else found

    def _back(self, group: int | str) -> Node:
        """Returns a reference to a group. A group that has not ended matches the empty text."""
        return Back(group) if group in self._groups or self._behind else NOTHING

    def _escape(self, *, in_class: bool) -> int | Chars:
        """Returns the character or the class that an escape stands for. The backslash has been read."""
        start = self._at
        if octal := self._match(_NUL if self._unicode else _OCTAL):
            return int(octal[0], 8)
        if code := self._match(_CODE) or (self._unicode and self._match(_LONG_CODE)) or None:
            return self._character(*(int(digits, 16) for digits in code.groups() if digits))
        char = self._next()
        if char in "wW" and "i" in self._flags and self._unicode:
            word = with_cases(WORD, unicode=True)
            return Chars(word if char == "w" else complement(word))
        if char in CLASSES:
            return Chars(CLASSES[char])
        if char in "pP" and (self._unicode or self._peek("{")):
            return self._property(char)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "c":
            letter = self._match(_LETTER_IN_CLASS if in_class and not self._unicode else _LETTER)
            if letter:
                return ord(letter[0]) % 32
            self._at, char = start, "\\"
        elif char in _SYNTAX or char == "/" or (char == "-" and in_class):
            return ord(char)
        if self._unicode:
            self._refuse("invalid escape")
        return ord(char)

    def _character(self, code: int, trail: int | None = None) -> int:
        """Returns the character with the number `code`, or that of the surrogate pair `code` and `trail`."""
        if trail is not None:
            return 0x10000 + ((code - 0xD800) << 10) + trail - 0xDC00
        if code > 0x10FFFF:
            self._refuse("invalid escape")
        if self._unicode and 0xD800 <= code < 0xE000:
            raise _HalvesError
        return code

    def _property(self, char: str) -> Chars:
        found = PROPERTY.match(self._text, self._at)
        if found is None:
            return Chars(((ord(char), ord(char)),)) if not self._unicode else self._refuse("unknown property")
        self._at = found.end()
        self._doubtful = not self._unicode
        return Chars((), (found[1],), negated=char == "P", folded="i" in self._flags)

    def _class(self) -> Chars:
        start = self._at - 1
        negated = self._take("^")
        spans: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                self._at = start
                self._refuse("unterminated class")
            before = self._at
            low = self._class_atom()
            members = [low]
            if self._peek("-") and not self._peek("-]") and self._at + 1 < len(self._text):
                self._at += 1
                high = self._class_atom()
                members = [low, ord("-"), high]
                if isinstance(low, int) and isinstance(high, int):
                    if low > high:
                        self._at = before
                        self._refuse("range out of order")
                    spans.append((low, high))
                    continue
                if self._unicode:
                    self._at = before
                    self._refuse("a class cannot end a range")
            for part in members:
                if isinstance(part, Chars):
                    spans += part.spans
                    properties += [f"^{name}" if part.negated else name for name in part.properties]
                else:
                    spans.append((part, part))
        return self._chars(union(spans), tuple(properties), negated=negated)

    def _chars(self, spans: Spans, properties: tuple[str, ...] = (), *, negated: bool = False) -> Chars:
        folded = "i" in self._flags
        if folded and not properties and (not spans or spans[-1][1] < 128):
            spans, folded = with_cases(spans, unicode=self._unicode), False
        if negated and not properties and not folded:
            return Chars(complement(spans))
        return Chars(spans, properties, negated, folded)

    def _class_atom(self) -> int | Chars:
        char = self._next()
        if char != "\\":
            return ord(char)
        if self._take("b"):
            return 8
        if self._named and not self._unicode and self._peek("k"):
            self._refuse("invalid escape")
        return self._escape(in_class=True)


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else _MOST_TIMES


def _spelled(name: str) -> str:
    """Returns the name of a group with its escapes decoded."""
    return _NAME_ESCAPE.sub(lambda found: chr(min(int(found[1] or found[2], 16), 0x10FFFF)), name)
