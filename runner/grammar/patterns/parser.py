"""Parses the regular expressions of JSON schemas: ECMA-262's, with the modifiers of 2025.

A pattern is read as with the flag `u`, as JSON Schema recommends. One that is valid only without it, or that spells
halves of surrogate pairs, is read by the older grammar (Annex B). Characters are code points either way.

Two forms of Python's are read as well, since schemas made of Python types have them, and ECMA-262 gives them no
meaning: flags for the whole pattern in front of it, `(?i)`, and groups named `(?P<name>...)`.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

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
from runner.grammar.patterns.nodes import NEVER, NOTHING, Back, Chars, Edge, Look, Node, alt, repeat, seq

_MOST_DEPTH = 60
_MOST_TIMES = 10**9
_SYNTAX = frozenset("^$\\.*+?()[]{}|")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NAME_ESCAPE = re.compile(r"\\u(?:\{([0-9A-Fa-f]{1,8})\}|([0-9A-Fa-f]{4}))")
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_NAMED = re.compile(r"\(\?P?<(?![=!])")
_HEX = frozenset("0123456789abcdefABCDEF")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class PatternError(ValueError):
    """An invalid pattern; the text says why, and where."""


class PatternDepthError(Exception):
    """A pattern whose groups are nested too deep to be read."""


class _HalvesError(Exception):
    """The pattern spells half of a surrogate pair."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that has been read, and its groups by number and name."""

    node: Node
    groups: dict[int | str, Node]
    doubtful: bool
    """It is valid only without the flag `u`, but has properties, which need it; they are read as such."""


def parse(text: str) -> Pattern:
    """Reads a pattern.

    Raises:
        PatternError: it is no regular expression.
        PatternDepthError: its groups are nested deeper than 60 levels.
    """
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
        self._captures, self._names = _captures(text)
        self._named = unicode or bool(self._names)
        self._taken = frozenset[str]()
        """The names of groups that may match together with what is next."""
        self._doubtful = False

    def pattern(self) -> Pattern:
        if whole := _FLAGS.match(self._text):
            self._flags, self._at = frozenset(whole[1]), whole.end()
        node = self._disjunction()
        if self._at < len(self._text):
            self._refuse("unmatched `)`")
        return Pattern(node, self._groups, self._doubtful)

    # --- Reading.

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

    def _digits(self, known: frozenset[str] | str, most: int) -> str:
        end = self._at
        while end < len(self._text) and end - self._at < most and self._text[end] in known:
            end += 1
        found = self._text[self._at : end]
        self._at = end
        return found

    # --- Terms.

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
        elif char in "*+?" or (char in "{}]" and self._unicode):
            self._at = start
            self._refuse(f"nothing to repeat before `{char}`" if char in "*+?{" else f"unmatched `{char}`")
        else:
            self._at = start
            if char == "{" and self._braces() is not None:
                self._refuse("nothing to repeat before `{`")
            self._at = start + 1
            atom = self._char(ord(char))
        return self._quantified(atom)

    def _quantified(self, atom: Node) -> Node:
        bounds: tuple[int, int | None] | None = None
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if bounds is None and self._take(mark):
                bounds = times
        if bounds is None:
            start = self._at
            bounds = self._braces()
            if bounds is None:
                if self._unicode and self._peek("{"):
                    self._refuse("incomplete quantifier")
                return atom
            if bounds[1] is not None and bounds[0] > bounds[1]:
                self._at = start
                self._refuse("numbers out of order in the quantifier")
        self._take("?")
        least, most = bounds
        return repeat(atom, min(least, _MOST_TIMES), most if most is None or most < _MOST_TIMES else None)

    def _braces(self) -> tuple[int, int | None] | None:
        """Returns the bounds of `{2}`, `{2,}` or `{2,3}`; None if no such text is next."""
        start = self._at
        if self._take("{"):
            least = self._digits("0123456789", len(self._text))
            comma = self._take(",")
            most = self._digits("0123456789", len(self._text)) if comma else least
            if least and self._take("}"):
                return _number(least), _number(most) if most else None
        self._at = start
        return None

    def _char(self, code: int) -> Chars:
        return self._chars(((code, code),))

    def _group(self) -> tuple[Node, str]:
        """Returns a group, and how it looks around if it does."""
        start = self._at
        number: int | None = None
        name, look, behind, flags = "", "", False, self._flags
        if self._take("?"):
            if self._take("<=") or self._take("<!"):
                look, behind = self._text[self._at - 1], True
            elif self._take("=") or self._take("!"):
                look = self._text[self._at - 1]
            elif self._take("<") or self._take("P<"):
                name = self._name()
                if name in self._taken:
                    self._refuse(f"a second group {name}")
                self._taken |= {name}
            elif not self._take(":"):
                self._flags = self._modifiers()
        if name or self._at == start:
            self._count += 1
            number = self._count
        self._behind += behind
        node = self._disjunction()
        self._behind -= behind
        self._flags = flags
        if not self._take(")"):
            self._at = start - 1
            self._refuse("unterminated group")
        if number is not None:
            self._groups[number] = node
            if name:
                self._groups[name] = alt([self._groups.get(name, NEVER), node])
        look = "<" * behind + look
        if look and isinstance(node, Chars) and node == Chars(node.spans):
            return Edge(look, spans=node.spans), look
        return Look(node, behind, look.endswith("!")) if look else node, look

    def _modifiers(self) -> frozenset[str]:
        on = self._digits("ims", 4)
        off = self._digits("ims", 4) if (minus := self._take("-")) else ""
        if not self._take(":") or len({*on, *off}) < len(on + off) or (minus and not on + off):
            self._refuse("invalid group")
        return self._flags.union(on).difference(off)

    def _name(self) -> str:
        end = self._text.find(">", self._at)
        name = _spelled(self._text[self._at : max(end, self._at)])
        if not name.replace("$", "_").replace("\u200c", "_").replace("\u200d", "_").isidentifier():
            self._refuse("invalid group name")
        self._at = end + 1
        return name

    # --- Escapes.

    def _atom_escape(self) -> Node:
        start = self._at
        if self._at < len(self._text) and self._text[self._at] in "123456789":
            digits = self._digits("0123456789", len(self._text))
            if (number := _number(digits)) <= self._captures:
                # A group that has not ended stands for no text.
                return Back(number) if number in self._groups or self._behind else NOTHING
            self._at = start
            if self._unicode:
                self._refuse(f"reference to group {digits}, which is not there,")
        if self._named and self._take("k"):
            if not self._take("<"):
                self._refuse("invalid group reference")
            name = self._name()
            if name not in self._names:
                self._refuse(f"reference to group {name}, which is not there,")
            return Back(name) if name in self._groups or self._behind else NOTHING
        found = self._escape(in_class=False)
        return self._char(found) if isinstance(found, int) else found

    def _escape(self, *, in_class: bool) -> int | Chars:
        """Returns the character after a backslash, or the class."""
        start = self._at
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
            letter = self._text[self._at : self._at + 1]
            if letter in _LETTERS or (in_class and not self._unicode and letter and letter in "0123456789_"):
                self._at += 1
                return ord(letter) % 32
            self._at = start
            return self._literal("\\")
        if char == "0" and not ("0" <= self._text[self._at : self._at + 1] <= "9"):
            return 0
        if char in "01234567" and not self._unicode:
            self._at = start
            digits = self._digits("01234567", 3 if char <= "3" else 2)
            return int(digits, 8)
        if char in "xu":
            code = self._hexadecimal(2 if char == "x" else 4)
            return self._literal(char) if code is None else code
        if char in _SYNTAX or char == "/" or (char == "-" and in_class):
            return ord(char)
        return self._literal(char)

    def _literal(self, char: str) -> int:
        """Returns a character that may stand for itself only without the flag `u`."""
        if self._unicode:
            self._refuse("invalid escape")
        return ord(char)

    def _hexadecimal(self, ndigits: int) -> int | None:
        start = self._at
        if ndigits == 4 and self._unicode and self._take("{"):
            digits = self._digits(_HEX, len(self._text))
            if not digits or not self._take("}") or int(digits, 16) > 0x10FFFF:
                self._refuse("invalid escape")
            return self._whole(int(digits, 16))
        digits = self._digits(_HEX, ndigits)
        if len(digits) < ndigits:
            self._at = start
            return None
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):
            low = self._digits(_HEX, 4)
            if len(low) == 4 and 0xDC00 <= int(low, 16) < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + int(low, 16) - 0xDC00
            self._at = start + 4
        return self._whole(code)

    def _whole(self, code: int) -> int:
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

    # --- Classes.

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
            high: int | Chars | None = None
            if self._peek("-") and not self._peek("-]") and self._at + 1 < len(self._text):
                self._at += 1
                high = self._class_atom()
            if isinstance(low, int) and isinstance(high, int):
                if low > high:
                    self._at = before
                    self._refuse("range out of order")
                spans.append((low, high))
                continue
            if high is not None:
                if self._unicode:
                    self._at = before
                    self._refuse("a class cannot end a range")
                spans.append((ord("-"), ord("-")))
            for part in (low, high):
                if isinstance(part, Chars):
                    spans += part.spans
                    properties += [f"^{name}" if part.negated else name for name in part.properties]
                elif part is not None:
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
        if self._unicode and self._take("-"):
            return ord("-")
        if self._named and not self._unicode and self._peek("k"):
            self._refuse("invalid escape")
        return self._escape(in_class=True)


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 12 else 10**12


def _captures(text: str) -> tuple[int, set[str]]:
    """Returns the number of capturing groups, and the names of those that have one."""
    count, names, at, in_class = 0, set[str](), 0, False
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif in_class or char == "[":
            in_class = char != "]"
        elif char == "(":
            named = _NAMED.match(text, at)
            count += named is not None or not text.startswith("(?", at)
            if named:
                names.add(_spelled(text[named.end() : max(text.find(">", at), named.end())]))
        at += 1
    return count, names


def _spelled(name: str) -> str:
    """Returns the name of a group without its escapes."""
    return _NAME_ESCAPE.sub(lambda found: chr(min(int(found[1] or found[2], 16), 0x10FFFF)), name)
