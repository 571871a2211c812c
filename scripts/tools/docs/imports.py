"""Draws which package of `runner` imports which, for docs/imports.svg.

Three columns: the packages around the wings, the wings, the core; each in the order of the table in architecture.md.
An import of a package that is not in a lower row of the table is red. What lies below the core is imported everywhere,
and only named. The picture depends on which packages import each other, not on how often.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from scripts.tools import ROOT

_TABLE = ROOT / "docs/architecture.md"
_ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", re.MULTILINE)
_COLORS = {"around": "#3b6ea5", "wing": "#7a5195", "core": "#2f7d4f"}
_UP = "#d33"
_WIDTH, _HEIGHT, _BOX, _BOX_HEIGHT, _TOP = 900, 560, 120, 32, 60


class _Box(NamedTuple):
    """A package in its column; x and y are those of its middle, in pixels."""

    name: str
    row: int
    kind: str
    column: int
    x: int
    y: int


def imports_svg() -> str:
    """Returns the picture. Raises ValueError if the table names other packages than there are."""
    kinds = {name: (row, kind) for name, row, kind in _kinds()}
    edges = {*_imports()}
    if (named := {name for edge in edges for name in edge}) != kinds.keys():
        raise ValueError(f"the table in architecture.md and the imports differ by {sorted(named ^ kinds.keys())}")
    boxes = {box.name: box for box in _boxes(kinds)}
    below = ", ".join(name for name, (_, kind) in kinds.items() if kind == "below")
    lines = [_edge(boxes[one], boxes[other]) for one, other in sorted(edges) if {one, other} <= boxes.keys()]
    titles = [_text(130 + 320 * column, 30, kind, color) for column, (kind, color) in enumerate(_COLORS.items())]
    note = _text(_WIDTH // 2, _HEIGHT - 16, f"imported by all of them: {below}", "#555")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, ground, *lines, *map(_drawn, boxes.values()), *titles, note, "</svg>", ""])


def _kinds() -> Iterator[tuple[str, int, str]]:
    """Yields each package of the table with its row and its kind; those after the core are `below`."""
    section = _TABLE.read_text().partition("## Who may import whom")[2].partition("\n## ")[0]
    kind = ""
    for row, (names, text) in enumerate(_ROW.findall(section)):
        first = re.match(r"wing|core", text)
        kind = first[0] if first else "below" if kind in ("core", "below") else "around"
        yield from ((name, row, kind) for name in re.findall(r"\w+", names))


def _imports() -> Iterator[tuple[str, str]]:
    """Yields pairs of packages: one, and another that it imports."""
    for path in (ROOT / "runner").rglob("*.py"):
        own = path.relative_to(ROOT / "runner").parts[0].removesuffix(".py")
        for node in import_nodes(path.read_text()):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            modules = [before + alias.name for alias in node.names]
            for package, _, rest in (module.partition(".") for module in modules):
                if package == "runner" and (name := rest.partition(".")[0]) not in ("", own):
                    yield own, name


def import_nodes(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields all imports of a module in their order, also those inside functions. Skips expressions: they are most."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        blocks = (getattr(node, name, ()) for name in ("cases", "finalbody", "orelse", "handlers", "body"))
        waiting += [each for block in blocks if isinstance(block, list) for each in reversed(block)]


def _boxes(kinds: Mapping[str, tuple[int, str]]) -> Iterator[_Box]:
    for column, kind in enumerate(_COLORS):
        names = [name for name, (_, each) in kinds.items() if each == kind]
        step = (_HEIGHT - _TOP - 50) // len(names)
        for place, name in enumerate(names):
            yield _Box(name, kinds[name][0], kind, column, 130 + 320 * column, _TOP + step // 2 + step * place)


def _edge(one: _Box, other: _Box) -> str:
    if one.column == other.column:
        side = 1 if one.kind == "core" else -1
        x = one.x + side * _BOX // 2
        bow = x + side * (20 + abs(other.y - one.y) // 6)
        way = f"M{x} {one.y} C{bow} {one.y} {bow} {other.y} {x} {other.y}"
    else:
        side = 1 if one.column < other.column else -1
        start, end = one.x + side * _BOX // 2, other.x - side * _BOX // 2
        way = f"M{start} {one.y} C{start + side * 90} {one.y} {end - side * 90} {other.y} {end} {other.y}"
    color = _COLORS[one.kind] if one.row < other.row else _UP
    return f'<path d="{way}" stroke="{color}" fill="none" opacity=".7"><title>{one.name} → {other.name}</title></path>'


def _drawn(box: _Box) -> str:
    place = f'x="{box.x - _BOX // 2}" y="{box.y - _BOX_HEIGHT // 2}" width="{_BOX}" height="{_BOX_HEIGHT}" rx="5"'
    return f'<rect {place} fill="white" stroke="{_COLORS[box.kind]}"/>{_text(box.x, box.y + 5, box.name, "#222")}'


def _text(x: int, y: int, text: str, color: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" font-size="14" fill="{color}">{text}</text>'
