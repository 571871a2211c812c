"""The time of a token, part by part, from a run of this runner with `--trace`."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scripts.tools.bench.common.contenders import serve
from scripts.tools.bench.common.report import Table
from scripts.tools.bench.common.requests import SHORT_TOKENS, answer
from scripts.tools.bench.common.servers import Server
from scripts.tools.bench.llamas import Prompts, Size

PARTS = {
    "schedule": "who comes next",
    "forward": "Python builds the graph of the forward",
    "sample": "and that of the sampling",
    "dispatch": "MLX takes it; on a CPU it computes most of it meanwhile",
    "wait": "until the token is there",
    "text": "token to text, stop strings, events",
    "publish": "the numbers of the status",
    "hand over": "events to the event loop",
    "between": "from one step to the next",
}
"""Of a decode step, in the order of time."""
_STEP = "decode"
_FIRST_STEPS = 8  # of which the first ones are others: no forward ahead, buffers of new sizes


class Profile(NamedTuple):
    """Microseconds of each of PARTS in one decode step: medians over `steps` steps."""

    steps: int
    step_us: float
    parts_us: Mapping[str, float]

    def table(self, name: str) -> Table:
        """For a person."""
        rows = [
            (part, f"{us:.0f}", f"{100 * us / self.step_us:.1f}", PARTS[part]) for part, us in self.parts_us.items()
        ]
        title = f"{name}: where a token's time goes, medians of {self.steps} steps of {self.step_us:.0f} us"
        return Table(title, ("", "us", "%", ""), rows)

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return self._asdict()


def profiled(trace: Path, size: Size, seed: int, ours: Server, tokens: int) -> Profile:
    """Runs our runner with a trace, which stays there, over an answer of so many tokens."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    traced = ours._replace(environment={**ours.environment, "MLX_RUNNER_TRACE": str(trace.resolve())})
    with asyncio.Runner() as loop, ExitStack() as stack:
        ((endpoint, _),) = serve(size, seed, [traced], stack, loop).values()
        prompts = Prompts(seed)
        for _ in range(3):  # what is written when the second one begins is all of the first one at least
            loop.run(answer(endpoint, prompts.text(SHORT_TOKENS), tokens))
    return read(trace.read_text())


def read(text: str) -> Profile:
    """Reads the profile from a trace. ValueError if no answer in it is long enough."""
    lines = [line.rstrip(",") for line in text.splitlines()[1:]]
    events = sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda event: float(event["ts"]))
    steps = [event for event in events if event["name"] == _STEP][_FIRST_STEPS:]
    if len(steps) < 2:
        raise ValueError("the trace has too few decode steps")
    found: dict[str, list[float]] = defaultdict(list)
    parts = iter(event for event in events if event["name"] in PARTS)
    part = next(parts, None)
    for step, following in pairwise(steps):
        end = step["ts"] + step["dur"]
        inside: dict[str, float] = defaultdict(float)
        while part is not None and part["ts"] < end:
            if part["ts"] >= step["ts"]:
                inside[part["name"]] += part["dur"]
            part = next(parts, None)
        inside["between"] = following["ts"] - end
        for name in PARTS:
            found[name].append(inside[name])
    return Profile(len(steps) - 1, _step_us(steps), {name: median(found[name]) for name in PARTS})


def _step_us(steps: Sequence[Mapping[str, float]]) -> float:
    return median(after["ts"] - before["ts"] for before, after in pairwise(steps))
