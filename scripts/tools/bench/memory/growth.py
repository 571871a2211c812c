"""The growth of a process over many prompts."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.tools.bench.common.requests import FEW_TOKENS, ask
from scripts.tools.bench.common.servers import Endpoint
from scripts.tools.bench.llamas import Prompts
from scripts.tools.host.lib import Client, Process

SAMPLES = 50


class Sample(NamedTuple):
    """After so many prompts: bytes of the process that are in memory, and what the runner says of MLX's."""

    prompts: int
    rss: int
    told: int | None


class Growth(NamedTuple):
    """A process before and after the conversations."""

    before: Sample
    after: Sample

    @property
    def resident(self) -> int:
        """Bytes more."""
        return self.after.rss - self.before.rss

    @property
    def told(self) -> int | None:
        """Bytes more; None if the server does not tell."""
        return None if self.before.told is None or self.after.told is None else self.after.told - self.before.told


class Slope(NamedTuple):
    """A straight line through the second half of some figures: its height in the middle of all, and what it rises until
    the end."""

    begin: float
    rise: float

    @property
    def share(self) -> float:
        """The rise, of what it began with."""
        return self.rise / self.begin

    @classmethod
    def of(cls, at: Sequence[int], figures: Sequence[int]) -> "Slope":
        """Least squares. ValueError with fewer than four figures."""
        if len(at) < 4:
            raise ValueError("there is no line through fewer than two figures of the second half")
        xs, ys = at[len(at) // 2 :], figures[len(figures) // 2 :]
        x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
        both = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        steep = both / sum((x - x_mean) ** 2 for x in xs)
        return cls(y_mean + steep * (xs[0] - x_mean), steep * (xs[-1] - xs[0]))


def rss(pid: int) -> int:
    """Bytes of a process that are in memory."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True, text=True)
    return int(told.stdout) << 10


async def sample(process: Process, told: Client | None, prompts: int = 0) -> Sample:
    """Of now; `told` asks the runner."""
    return Sample(prompts, rss(process.pid), (await told.status()).memory if told else None)


async def grow(
    process: Process, told: Client | None, endpoint: Endpoint, prompts: Prompts, count: int, tokens: int
) -> list[Sample]:
    """So many prompts that share nothing, one after the other, with some tokens answered to each."""
    samples = []
    for number in range(1, count + 1):
        await ask(endpoint, prompts.text(tokens), FEW_TOKENS)
        if number % max(1, count // SAMPLES) == 0:
            samples.append(await sample(process, told, number))
    return samples
