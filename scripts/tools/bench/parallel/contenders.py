"""The contenders of `scripts/bench parallel`, and their order."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from scripts.tools.bench.common.bare_loop import BareLoop
from scripts.tools.bench.common.requests import SHORT_TOKENS, ask
from scripts.tools.bench.common.servers import Endpoint
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.parallel.clients import Rate, decode, drop, gaps, share
from scripts.tools.bench.parallel.report import Row, Shape

Cell = tuple[str, int]
"""What is measured, and with how many streams, or a prompt or prefix of how many tokens."""

_CELL_S = 300.0
"""The most that one contender may take for one figure."""


class Contender(Protocol):
    """One of those that are measured."""

    name: str

    async def measure(self, cell: Cell, prompts: Prompts, row: Row) -> None:
        """One figure, added to the row; nothing where it has none."""
        ...


class Served:
    """A server behind an endpoint."""

    def __init__(self, name: str, endpoint: Endpoint, shape: Shape) -> None:
        self.name = name
        self._endpoint = endpoint
        self._shape = shape

    async def measure(self, cell: Cell, prompts: Prompts, row: Row) -> None:
        """Raises what clients raise, `MismeasuredError` and TimeoutError."""
        what, number = cell
        async with asyncio.timeout(_CELL_S):
            await ask(self._endpoint, prompts.text(SHORT_TOKENS), 1)  # what the last turn left behind is over
            if what == "decode":
                rate = await decode(self._endpoint, prompts, number, self._shape.tokens)
                row.decode.setdefault(number, []).append(rate)
            elif what == "gap":
                row.gap.setdefault(number, []).append(await gaps(self._endpoint, prompts, number))
            elif what == "drop":
                row.drop.setdefault(number, []).append(await drop(self._endpoint, prompts, number))
            else:
                row.shared.append(await share(self._endpoint, prompts, number))


class Bare:
    """The loop without a server; it only decodes."""

    def __init__(self, name: str, loop: BareLoop, shape: Shape) -> None:
        self.name = name
        self._loop = loop
        self._tokens = shape.tokens

    async def measure(self, cell: Cell, prompts: Prompts, row: Row) -> None:
        """Nothing but what is measured runs meanwhile."""
        what, number = cell
        if what == "decode":
            speed = self._loop.decode([prompts.ids(SHORT_TOKENS) for _ in range(number)], self._tokens)
            row.decode.setdefault(number, []).append(Rate(speed, True))


async def take_turns(
    contenders: Sequence[Contender], cells: Sequence[Cell], turns: int, prompts: Prompts, say: Callable[[str], None]
) -> list[Row]:
    """Every cell by every contender before the next cell; who begins changes from turn to turn. The first turn does not
    count."""
    rows: list[Row] = []
    for turn in range(turns + 1):
        if turn < 2:
            rows = [Row(contender.name) for contender in contenders]
        for cell in cells:
            say(f"turn {turn} of {turns}: {cell[0]} {cell[1]} ..." if turn else f"warming up: {cell[0]} {cell[1]} ...")
            for place in range(len(contenders)):
                index = (turn + place) % len(contenders)
                await contenders[index].measure(cell, prompts, rows[index])
    return rows
