"""Translates the regular expressions of JSON schemas from ECMA-262's dialect into llguidance's.

A translation must match a whole text. It has only characters, sequences, choices and repetitions, which mean the same
in every dialect. Edges (`^`, `$`, `\\b`) depend on the characters beside them. They are resolved: the translation means
the same without them. A look-ahead or look-behind becomes a second pattern that must match too.
"""

from collections.abc import Sequence
from itertools import groupby, product
from math import inf, prod
from typing import NamedTuple

from runner.grammar.patterns.charsets import (
    EVERY,
    HALVES,
    NEWLINES,
    WORD,
    Spans,
    atoms,
    complement,
    intersection,
    union,
)
from runner.grammar.patterns.nodes import (
    NEVER,
    NOTHING,
    Alt,
    Back,
    Chars,
    Edge,
    Look,
    Node,
    Repeat,
    Seq,
    alt,
    beginnings,
    is_plain,
    repeat,
    seq,
    within,
)
from runner.grammar.patterns.opposite import opposite
from runner.grammar.patterns.parser import Pattern, PatternDepthError, parse_pattern

_MOST_STEPS = 3000
_MOST_UNROLLED = 4
_MOST_CONJUNCTS = 6
_MOST_WAYS = 4
"""With more patterns to follow together, llguidance begins to refuse allowed tokens after a few answers."""
_MOST_KINDS = 12
_MOST_CHARACTERS = 1 << 16
"""The most characters of a pattern, and of the pattern's shortest text. A translation may have four times as many."""
_WHOLE = complement(HALVES)
_ESCAPED: Spans = ((34, 34), (92, 92))
_NO_NUL: Spans = ((1, 0x10FFFF),)
"""llguidance mistakes a class of all control characters for all characters that JSON escapes, and would then allow
quotes. So NUL is always left out of such a class."""
_NO_CHAR = r"^\x{0}-\x{10FFFF}"
_ANY = repeat(Chars(EVERY), 0, None)
_LOOKS = {"=": "look-ahead", "!": "negative look-ahead", "<=": "look-behind", "<!": "negative look-behind"}
_START, _END, _SOMEWHERE = -1, -2, -3
"""Values in place of the kind of a character: the beginning of the text, the end of the text, an unknown place."""


class Translation(NamedTuple):
    """A pattern in llguidance's dialect."""

    patterns: tuple[str, ...]
    """The translated patterns. A text must match all of them."""
    left_out: str = ""
    """The part of the pattern that is left out, or "". Without `patterns`, the reason why the whole pattern is."""


class _UnsaidError(Exception):
    """The translation cannot express a part of the pattern. The message names that part."""


def translated(text: str) -> Translation:
    """Translates one pattern. Raises PatternError if `text` is not a regular expression."""
    if len(text) > _MOST_CHARACTERS:
        return Translation((), f"has more than {_MOST_CHARACTERS:,} characters")
    try:
        pattern = parse_pattern(text)
        if _lengths(pattern.node)[0] > _MOST_CHARACTERS:
            return Translation((), f"needs more than {_MOST_CHARACTERS:,} characters")
        translator = _Translator(pattern)
        spelled = dict.fromkeys(f"^(?:{_spelled(node)})$" for node in translator.nodes() if node != _ANY)
    except (PatternDepthError, RecursionError):
        return Translation((), "is nested too deep")
    except _UnsaidError as reason:
        return Translation((), str(reason))
    if sum(map(len, spelled)) > 4 * _MOST_CHARACTERS:
        return Translation((), "is too complex")
    doubt = ["the older grammar, for which `\\p` is a letter,"] if pattern.doubtful else []
    return Translation((*spelled,), ", ".join(dict.fromkeys([*translator.left_out, *doubt])))


class _Translator:
    """Resolves the edges and looks of one pattern."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self.left_out: list[str] = []
        self._steps = 0
        self._open = False
        """True while a repeated item is resolved alone, so that the text after it is unknown."""
        edges = [each for each in within(pattern.node) if isinstance(each, Edge)]
        self._kinds = atoms(dict.fromkeys(spans for edge in edges for spans in _asked(edge)), _MOST_KINDS)
        """The sets of characters that edges of the pattern distinguish. A kind is an index in this list."""
        if len(self._kinds) > _MOST_KINDS:
            raise _UnsaidError("is too complex")

    def nodes(self) -> list[Node]:
        """Returns nodes without edges. A text that matches the pattern matches each of these nodes as a whole."""
        whole = _trimmed((_ANY, self._pattern.node, _ANY))
        try:
            conjuncts = self._conjuncts(whole)
        except _UnsaidError:
            conjuncts = []
        if not 0 < len(conjuncts) <= _MOST_CONJUNCTS:
            self._steps = 0
            conjuncts = [[self._plain(item) if _looks(item) else item for item in whole]]
        return [_prompt(self._resolved(items)) for items in conjuncts]

    def _conjuncts(self, items: Sequence[Node]) -> list[Sequence[Node]]:
        """Returns the sequences that the whole text must match. Each look in `items` becomes one of its own."""
        items = _trimmed(items)
        at = next((at for at, item in enumerate(items) if _looks(item)), None)
        if at is None:
            return [items]
        self._spend()
        look, left, right = items[at], items[:at], items[at + 1 :]
        if isinstance(look, Look):
            found = self._looked(look, left, right)
            implied = bool(found) and [*(left if look.behind else right)] == [_ANY]
            return found if implied else [*found, *self._conjuncts([*left, *right])]
        options = look.options if isinstance(look, Alt) else ()
        if isinstance(look, Repeat) and (look.least, look.most) == (0, 1):
            options = (NOTHING, look.item)
        ways = [self._conjuncts([*left, option, *right]) for option in options]
        if not options or prod(map(len, ways)) > _MOST_WAYS:
            return self._conjuncts([*left, self._plain(look), *right])
        return [(alt(map(seq, choice)),) for choice in product(*ways)]

    def _looked(self, look: Look, left: Sequence[Node], right: Sequence[Node]) -> list[Sequence[Node]]:
        """Returns the conditions that a look between `left` and `right` sets for the whole text."""
        before, after = (left, right) if not look.behind else (right, left)
        least, most = _lengths(seq(before))
        if least < most and [*after] != [_ANY]:
            self.left_out.append(f"the place of {_LOOKS[look.kind]}")
        if not look.negative:
            return self._conjuncts((_ANY, look.item, *right) if look.behind else (*left, look.item, _ANY))
        seen = _Translator(Pattern(look.item, self._pattern.groups, doubtful=False))
        try:
            forbidden = seen._alone(look, edge=not before)
            allowed = opposite(forbidden) if not seen.left_out else None
        except _UnsaidError:
            allowed = None
        if allowed is None:
            self.left_out.append(_LOOKS[look.kind])
            return []
        return self._conjuncts((allowed, *right) if look.behind else (*left, allowed))

    def _alone(self, look: Look, *, edge: bool) -> Node:
        """Returns a node for the texts, on one side of a place, in which `look` finds its item."""
        for each in within(look.item):
            if isinstance(each, Look | Back) or (
                isinstance(each, Edge) and look.behind and not edge and each.kind != "^"
            ):
                raise _UnsaidError("what stands on its other side")
        items = _trimmed((_ANY, look.item) if look.behind else (look.item, _ANY))
        return self._walk(_START if edge or look.behind else _SOMEWHERE, None, items)

    def _resolved(self, items: Sequence[Node]) -> Node:
        """Returns the sequence `items` without edges. Edges that cannot be resolved are left out."""
        flat = tuple(items)
        try:
            return self._walk(_START, None, flat)
        except (_UnsaidError, RecursionError):
            self._steps = 0
        kept = tuple(item if isinstance(item, Edge) and not _is_word(item) else self._plain(item) for item in flat)
        return self._walk(_START, None, kept)

    def _walk(self, before: int, need: frozenset[int] | None, items: tuple[Node, ...]) -> Node:
        """Returns `items` without edges. They match the end of a text: the character before it is of the kind `before`,
        and its first character is of one of the kinds `need` (None: of any kind)."""
        self._spend()
        if not any(item.edges for item in items):
            whole = seq(items)
            if need is None:
                return whole
            if whole.empty and self._open:
                raise _UnsaidError("asks for what follows")
            nothing = [NOTHING] if _END in need and whole.empty else []
            return alt([*nothing, self._beginning(whole, self._spans(need))])
        head, rest = items[0], items[1:]
        match head:
            case Edge():
                after = self._after(head, before)
                need = after if need is None else need & after
                return self._walk(before, need, rest) if need else NEVER
            case Seq(inner) if head.edges:
                return self._walk(before, need, (*inner, *rest))
            case Alt(options) if head.edges:
                return alt(self._walk(before, need, (option, *rest)) for option in options)
            case Repeat(item, least, most) if head.edges and most is not None and most <= _MOST_UNROLLED:
                more = self._walk(before, need, (item, repeat(item, max(least - 1, 0), most - 1), *rest))
                return more if least else alt([self._walk(before, need, rest), more])
            case Repeat() if head.edges:
                return self._walk(before, need, (self._by_itself(head), *rest))
            case Look() | Back():
                return self._walk(before, need, (self._plain(head), *rest))
        asked = _ask_before(rest)
        if need is None and not asked:
            return seq([head, self._walk(_SOMEWHERE, None, rest)])
        ways = [self._walk(before, need, rest)] if head.empty else []
        first = head if need is None else self._beginning(head, self._spans(need))
        for kind, spans in enumerate(self._kinds) if asked and first != NEVER else ():
            last = self._beginning(first, spans, -1)
            if last != NEVER:
                ways.append(seq([last, self._walk(kind, None, rest)]))
        if not asked and first != NEVER:
            ways.append(seq([first, self._walk(_SOMEWHERE, None, rest)]))
        return alt(ways)

    def _by_itself(self, node: Repeat) -> Node:
        """Returns a repetition without edges. Edges that depend on the text around the repeated item are left out."""
        known, self._open = self._open, True
        try:
            return repeat(self._walk(_SOMEWHERE, None, (node.item,)), node.least, node.most)
        except _UnsaidError:
            return self._plain(node)
        finally:
            self._open = known

    def _after(self, edge: Edge, before: int) -> frozenset[int]:
        """Returns the kinds of characters that may follow `edge` if a character of the kind `before` precedes it."""
        every = frozenset((*range(len(self._kinds)), _END))
        asked = [span for spans in _asked(edge) for span in spans]
        beside = frozenset(
            kind for kind, [(first, _), *_] in enumerate(self._kinds) if any(a <= first <= b for a, b in asked)
        )
        if edge.kind == "$":
            return beside | {_END}
        if edge.kind in "=!":
            return beside if edge.kind == "=" else every - beside
        if before == _SOMEWHERE:
            raise _UnsaidError("asks for what comes before")
        if edge.kind in "bB":
            return beside if (before in beside) == (edge.kind == "B") else every - beside
        if edge.kind == "^":
            return every if before == _START or before in beside else frozenset()
        return every if (before in beside) == (edge.kind == "<=") else frozenset()

    def _spans(self, kinds: frozenset[int]) -> Spans:
        return union(span for kind in kinds - {_END} for span in self._kinds[kind])

    def _beginning(self, node: Node, spans: Spans, step: int = 1) -> Node:
        """Returns the texts of `node` that begin with one of `spans` or, with a `step` of -1, end with one."""
        self._spend()
        if spans == EVERY and not node.empty:
            return node
        match node:
            case Chars():
                return _cut(node, spans)
            case Alt(options):
                return alt(self._beginning(option, spans, step) for option in options)
            case Repeat(item, least, most):
                one = self._beginning(item, spans, step)
                more = repeat(item, max(least - 1, 0), None if most is None else most - 1)
                return seq([one, more][::step]) if one != NEVER else NEVER
            case Seq(items):
                firsts = ((self._beginning(item, spans, step), rest) for item, rest in beginnings(items[::step]))
                return alt(seq([first, *rest][::step]) for first, rest in firsts)
        raise AssertionError(node)

    def _plain(self, node: Node) -> Node:
        """Returns `node` with all edges left out, so that it may match more texts. Adds each edge to `left_out`."""
        if not node.edges:
            return node
        match node:
            case Edge(kind):
                self.left_out.append(_LOOKS.get(kind) or ("`\\" if _is_word(node) else "`") + f"{kind}`")
            case Look():
                self.left_out.append(_LOOKS[node.kind])
            case Back(group):
                self._spend()
                self.left_out.append("references to groups")
                return repeat(self._plain(self._pattern.groups.get(group, _ANY)), 0, 1)
            case Seq(items):
                return seq(self._plain(item) for item in items)
            case Alt(options):
                return alt(self._plain(option) for option in options)
            case Repeat(item, least, most):
                return repeat(self._plain(item), least, most)
        return NOTHING

    def _spend(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _UnsaidError("is too complex")


def _looks(node: Node) -> bool:
    return node.edges and any(isinstance(each, Look) for each in within(node))


def _trimmed(items: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the parts of a sequence for a whole text. Drops `^` and `$` at its ends, and any text outside."""
    whole = seq(items)
    flat = [*(whole.items if isinstance(whole, Seq) else (whole,))]
    grouped: list[Node] = []
    for joins, run in groupby(flat, lambda item: not item.edges and item != _ANY):
        found = [*run]
        grouped += [seq(found)] if joins else found
    while len(grouped) > 1 and grouped[0] == _ANY and grouped[1] == Edge("^"):
        del grouped[:2]
    while len(grouped) > 1 and grouped[-1] == _ANY and grouped[-2] == Edge("$"):
        del grouped[-2:]
    return tuple(grouped)


def _prompt(node: Node) -> Node:
    """Returns `node` or, if it skips characters up to a certain one and then allows any text, an equal node that stops
    at the first such character. llguidance can then follow several patterns with far less work."""
    match node:
        case Seq((*before, Repeat(Chars() as skipped, 0, None), Chars() as found, after)) if after == _ANY:
            if is_plain(skipped) and is_plain(found):
                rest = Chars(intersection(skipped.spans, complement(found.spans)))
                return seq([*before, repeat(rest, 0, None), found, after])
    return node


def _is_word(node: Node) -> bool:
    return isinstance(node, Edge) and node.kind in "bB"


def _asked(edge: Edge) -> tuple[Spans, ...]:
    """Returns the set of characters that an edge tells from others; empty for the ends of a text."""
    if edge.kind in "bB":
        return (WORD,)
    if edge.kind in "^$":
        return (NEWLINES,) if edge.multiline else ()
    return (edge.spans,)


def _ask_before(items: Sequence[Node]) -> bool:
    """Returns True if the first edge of `items` may depend on the character before `items`."""
    firsts = (each for item, _ in beginnings(items) if item.edges for each in within(item))
    return any(isinstance(each, Edge) and each.kind not in "$=!" for each in firsts)


def _lengths(node: Node) -> tuple[float, float]:
    """Returns the lengths of the shortest and the longest text of a node. A reference may have any length."""
    match node:
        case Chars():
            return 1, 1
        case Seq(items):
            lengths = [*map(_lengths, items)]
            return sum(least for least, _ in lengths), sum(most for _, most in lengths)
        case Alt(options):
            lengths = [*map(_lengths, options)]
            return min(least for least, _ in lengths), max(most for _, most in lengths)
        case Repeat(item, times, most_times):
            least, most = _lengths(item)
            return least * times, (inf if most_times is None else most * most_times) if most else 0
        case Back():
            return 0, inf
    return 0, 0


def _cut(chars: Chars, spans: Spans) -> Chars:
    """Returns the characters of `chars` that are also in `spans`."""
    if chars.folded:
        raise _UnsaidError("asks for a word boundary without regard to case")
    if chars.properties or chars.negated:
        within = intersection(chars.within, spans)
        return Chars(chars.spans, chars.properties, chars.negated, within=within) if within else NEVER
    return Chars(intersection(chars.spans, spans))


def _spelled(node: Node) -> str:
    """Returns the text of a node without edges in llguidance's dialect."""
    match node:
        case Chars():
            return _class(node)
        case Seq(items):
            return "".join(f"(?:{_spelled(item)})" if isinstance(item, Alt) else _spelled(item) for item in items)
        case Alt(options):
            return "|".join(map(_spelled, options))
        case Repeat(item, least, most):
            text = _spelled(item) if isinstance(item, Chars) else f"(?:{_spelled(item)})"
            return f"{text}{{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


def _class(chars: Chars) -> str:
    if chars.spans and not chars.negated and intersection(chars.spans, HALVES) == chars.spans:
        raise _UnsaidError("asks for halves of surrogate pairs")
    if chars.folded and any(name.startswith("^") for name in chars.properties):
        raise _UnsaidError("negates a property without regard to case")
    if chars.spans == EVERY:
        return "(?s:.)"
    if not (chars.properties or chars.negated or chars.folded):
        return _spans_text(chars.spans)
    names = "".join(f"\\{'P' if name[0] == '^' else 'p'}{{{name.lstrip('^')}}}" for name in chars.properties)
    text = f"[{'^' if chars.negated else ''}{_ranges(chars.spans)}{names}]"
    text = f"[{text}&&{_spans_text(intersection(chars.within, _NO_NUL))}]"
    return f"(?i:{text})" if chars.folded else text


def _spans_text(spans: Spans) -> str:
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return _char(spans[0][0])
    if spans[:1] and spans[0][0] == 0 and spans[0][1] >= 31 and intersection(spans, _ESCAPED) != _ESCAPED:
        spans = intersection(spans, _NO_NUL)
    inside, outside = _ranges(spans), _ranges(complement(spans))
    return f"[^{outside}]" if outside and len(outside) < len(inside) else f"[{inside or _NO_CHAR}]"


def _ranges(spans: Spans) -> str:
    whole = intersection(spans, _WHOLE)
    return "".join(_char(low) + (f"-{_char(high)}" if high > low else "") for low, high in whole)


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char == "_") else f"\\x{{{code:X}}}"
