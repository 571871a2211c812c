"""Finds a regular expression for all texts that another one does not match, with a small automaton.

A state is a node for the texts that may follow (Brzozowski's derivatives). States are eliminated one by one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from runner.grammar.patterns.charsets import EVERY, Spans, atoms, union
from runner.grammar.patterns.nodes import (
    NEVER,
    NOTHING,
    Alt,
    Chars,
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

_MOST_STATES = 24
_MOST_ATOMS = 48
_MOST_PARTS = 24_000
_ANY = repeat(Chars(EVERY), 0, None)


def opposite(node: Node) -> Node | None:
    """Returns a node that matches exactly the texts that `node` does not match. `node` must have no edges. Returns None
    if the result is too large, or if `node` has characters that are known only by the name of a property."""
    sets = {each for each in within(node) if isinstance(each, Chars)}
    if not all(map(is_plain, sets)):
        return None
    parts = atoms([chars.spans for chars in sets], _MOST_ATOMS)
    states, waiting, arrows = {node: 0}, [node], list[dict[int, Spans]]()
    for state in waiting:
        if len(waiting) > _MOST_STATES or len(parts) > _MOST_ATOMS:
            return None
        arrows.append({})
        for atom in parts:
            after = _after(state, atom[0][0])
            if after not in states:
                states[after] = len(waiting)
                waiting.append(after)
            arrows[-1][states[after]] = union((*arrows[-1].get(states[after], ()), *atom))
    return _eliminated(arrows, [not state.empty for state in states])


def _after(node: Node, code: int) -> Node:
    """Returns a node for what follows the character `code` in the texts of `node` that begin with it."""
    match node:
        case Chars(spans):
            return NOTHING if any(low <= code <= high for low, high in spans) else NEVER
        case Alt(options):
            return _either(_after(option, code) for option in options)
        case Repeat(item, least, most):
            if node == _ANY:
                return node
            return seq([_after(item, code), repeat(item, max(least - 1, 0), None if most is None else most - 1)])
        case Seq(items):
            return _either(seq([_after(item, code), *rest]) for item, rest in beginnings(items))
    raise AssertionError(node)


def _either(ways: Iterable[Node]) -> Node:
    options = [*ways]
    return _ANY if _ANY in options else alt(options)


def _eliminated(arrows: Sequence[dict[int, Spans]], ends: Sequence[bool]) -> Node | None:
    """Returns a node for the texts on all ways from state 0 to a state in `ends`; None if it has too many parts."""
    last = len(arrows)
    ways: dict[tuple[int, int], Node] = {
        (before, after): Chars(spans) for before, row in enumerate(arrows) for after, spans in row.items()
    }
    ways |= {(state, last): NOTHING for state, is_end in enumerate(ends) if is_end}
    ways[-1, 0] = NOTHING
    left = {*range(last)}
    while left:
        # Eliminating the state with the fewest ways through it makes the other ways grow least.
        through = Counter(before for before, after in ways if before != after)
        state = min(left, key=lambda each: through[each] * sum(after == each for _, after in ways))
        left.remove(state)
        loop = ways.pop((state, state), None)
        around = [NOTHING if loop is None else repeat(loop, 0, None)]
        into = {before: way for (before, after), way in ways.items() if after == state}
        out = {after: way for (before, after), way in ways.items() if before == state}
        ways = {pair: way for pair, way in ways.items() if state not in pair}
        for before, way in into.items():
            for after, beyond in out.items():
                more = seq([way, *around, beyond])
                ways[before, after] = alt([ways[before, after], more] if (before, after) in ways else [more])
                if sum(1 for _ in within(ways[before, after])) > _MOST_PARTS:
                    return None
    return ways.get((-1, last), NEVER)
