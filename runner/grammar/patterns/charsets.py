"""Sets of characters in the regular expressions of JSON schemas, and ECMA-262's names of such sets."""

import re
from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]
"""A set of characters as ranges of code points: both ends included, in ascending order, with gaps between ranges."""


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Returns the set of all characters in `spans`. The ranges may overlap and be in any order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(spans: Spans) -> Spans:
    """Returns the characters that are not in `spans`."""
    ends = [-1, *(end for span in spans for end in span), 0x110000]
    gaps = zip(ends[::2], ends[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in gaps if before + 1 < after)


def intersection(left: Spans, right: Spans) -> Spans:
    """Returns the characters that are in both sets."""
    return complement(union((*complement(left), *complement(right))))


def with_cases(spans: Spans, *, unicode: bool) -> Spans:
    """Returns ASCII characters with their other cases; with `unicode`, also U+212A for `k` and U+017F for `s`."""
    chars = "".join(chr(code) for low, high in spans for code in range(low, high + 1))
    chars += chars.swapcase()
    more = {0x212A: "k", 0x17F: "s"} if unicode else {}
    codes = [*map(ord, chars), *(code for code, letter in more.items() if letter in chars)]
    return union((code, code) for code in codes)


EVERY: Spans = ((0, 0x10FFFF),)
NEWLINES: Spans = ((10, 10), (13, 13), (0x2028, 0x2029))
DOT = complement(NEWLINES)
WORD: Spans = ((48, 57), (65, 90), (95, 95), (97, 122))
HALVES: Spans = ((0xD800, 0xDFFF),)
LEADS: Spans = ((0xD800, 0xDBFF),)
TRAILS: Spans = ((0xDC00, 0xDFFF),)
_DIGITS: Spans = ((48, 57),)
_SPACES: Spans = (
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
CLASSES = {"d": _DIGITS, "w": WORD, "s": _SPACES}
CLASSES |= {letter.upper(): complement(spans) for letter, spans in CLASSES.items()}


def astral(leads: Spans, trails: Spans) -> Spans:
    """Returns the characters that surrogate pairs of these halves stand for; empty if one is not a half."""
    if not leads or not trails or intersection(leads, LEADS) != leads or intersection(trails, TRAILS) != trails:
        return ()
    return union(
        (0x10000 + ((lead - 0xD800) << 10) + low - 0xDC00, 0x10000 + ((lead - 0xD800) << 10) + high - 0xDC00)
        for first, last in leads
        for lead in range(first, last + 1)
        for low, high in trails
    )


def atoms(sets: Iterable[Spans], most: int) -> list[Spans]:
    """Divides all characters into the fewest sets such that each lies wholly inside or wholly outside each of `sets`.
    Stops early once there are more than `most`."""
    found: list[Spans] = [EVERY]
    for spans in sets:
        if len(found) <= most:
            outside = complement(spans)
            found = [*filter(None, (intersection(atom, side) for atom in found for side in (spans, outside)))]
    return found


_CATEGORIES = """
Cased_Letter LC Close_Punctuation Pe Connector_Punctuation Pc Control Cc cntrl Currency_Symbol Sc Dash_Punctuation Pd
Decimal_Number Nd digit Enclosing_Mark Me Final_Punctuation Pf Format Cf Initial_Punctuation Pi Letter L Letter_Number
Nl Line_Separator Zl Lowercase_Letter Ll Mark M Combining_Mark Math_Symbol Sm Modifier_Letter Lm Modifier_Symbol Sk
Nonspacing_Mark Mn Number N Open_Punctuation Ps Other C Other_Letter Lo Other_Number No Other_Punctuation Po
Other_Symbol So Paragraph_Separator Zp Private_Use Co Punctuation P punct Separator Z Space_Separator Zs Spacing_Mark Mc
Surrogate Cs Symbol S Titlecase_Letter Lt Unassigned Cn Uppercase_Letter Lu
"""
_BINARY = """
ASCII ASCII_Hex_Digit AHex Alphabetic Alpha Any Assigned Bidi_Control Bidi_C Bidi_Mirrored Bidi_M Case_Ignorable CI
Cased Changes_When_Casefolded CWCF Changes_When_Casemapped CWCM Changes_When_Lowercased CWL
Changes_When_NFKC_Casefolded CWKCF Changes_When_Titlecased CWT Changes_When_Uppercased CWU Dash
Default_Ignorable_Code_Point DI Deprecated Dep Diacritic Dia Emoji Emoji_Component EComp Emoji_Modifier EMod
Emoji_Modifier_Base EBase Emoji_Presentation EPres Extended_Pictographic ExtPict Extender Ext Grapheme_Base Gr_Base
Grapheme_Extend Gr_Ext Hex_Digit Hex IDS_Binary_Operator IDSB IDS_Trinary_Operator IDST ID_Continue IDC ID_Start IDS
Ideographic Ideo Join_Control Join_C Logical_Order_Exception LOE Lowercase Lower Math Noncharacter_Code_Point NChar
Pattern_Syntax Pat_Syn Pattern_White_Space Pat_WS Quotation_Mark QMark Radical Regional_Indicator RI Sentence_Terminal
STerm Soft_Dotted SD Terminal_Punctuation Term Unified_Ideograph UIdeo Uppercase Upper Variation_Selector VS White_Space
space XID_Continue XIDC XID_Start XIDS
"""
_CATEGORY = "|".join(_CATEGORIES.split())
_SCRIPT = "[A-Z][a-z]+(?:_[A-Za-z]+)*"  # llguidance checks the names of scripts
PROPERTY = re.compile(
    rf"\{{((?:(?:General_Category|gc)=)?(?:{_CATEGORY})|{'|'.join(_BINARY.split())}|(?:Script(?:_Extensions)?|scx?)={_SCRIPT})\}}"
)
"""Matches the braces after `\\p` if ECMA-262 has the name in them."""
