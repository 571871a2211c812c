"""Random clients against one runner for some minutes: chats, branches, cancels, retries, nonsense, all at once.

Answers are compared with those of a second runner of the same model that has no cache. Beside that it checks that
memory and descriptors do not grow, that the status stays quick, and that the output holds nothing that a host would
take for an error. Exit status 0 only if all of that held.
"""

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import get_args

from runner.cache import CACHE_KINDS
from scripts.soak_checker import Checker
from scripts.soak_clients import Tally, Visitor
from scripts.soak_meter import QUICK_S, Meter, Trend, descriptors, settled
from tests.host import Client, G, LoadError, Process, spawn
from tests.models.checkpoints import Kind, write_checkpoint
from tests.models.store import write_store

MODEL = "soak:latest"
OURS = (sys.executable, "-m", "runner")
BUDGET_BYTES = 4 << 20
"""What the cache may hold: little, so that it is full within seconds and evicts from then on."""
WORKSPACE_BYTES = 64 << 20
"""By how much MLX's memory may exceed weights and cache while requests run."""
_GROWTH = 0.03  # of the resident memory, from the middle of the time to its end
_GROWTH_BYTES = 12 << 20
_SLOW = 0.001  # the share of status answers that a busy machine may delay
_TIES = 0.002
_SAY_EVERY_S = 10.0
_SHOWN = 5


class EndedError(Exception):
    """The runner ended before its time."""


@dataclass(frozen=True)
class Plan:
    """What to do; a model kind is one of tests/models/checkpoints.py."""

    minutes: float
    kind: Kind = "falcon_h1"
    cache: str = "trie"
    clients: int = 6
    seed: int = 0
    command: Sequence[str] = OURS


@dataclass
class Soaked:
    """What was seen. Of `latencies`, `own` leaves out what the machine was busy with other processes; `descriptors` are
    those of before and after, without any client, or None where nobody tells."""

    plan: Plan
    tally: Tally
    checker: Checker
    latencies: Sequence[float]
    own: Sequence[float]
    rss: Trend
    memory: Trend
    most_memory: int
    weights: int
    descriptors: tuple[int | None, int | None]
    captured: str
    faults: Sequence[str]
    exit_s: float

    @property
    def failures(self) -> list[str]:
        """One text for each thing that was not as it must be."""
        tally, checker = self.tally, self.checker
        found = [*self.faults, *tally.faults, *(f"wrong answer: {text}" for text in checker.wrong)]
        if not checker.checked:
            found.append("no answer was checked")
        if checker.ties > 1 + _TIES * checker.checked:
            found.append(f"{checker.ties} of {checker.checked} answers left the right one at a tie")
        if self.plan.cache != "none" and not tally.cached_tokens:
            found.append("nothing ever came from the cache")
        if _slow(self.own) > 1 + _SLOW * len(self.own):
            found.append(f"{_slow(self.own)} of {len(self.own)} status answers took longer than {QUICK_S * 1e3:.0f} ms")
        if self.rss.late - self.rss.warm > _GROWTH * self.rss.warm + _GROWTH_BYTES:
            found.append(f"resident memory grew from {_mib(self.rss.warm)} to {_mib(self.rss.late)}")
        if self.most_memory > self.weights + BUDGET_BYTES + WORKSPACE_BYTES:
            found.append(f"MLX held {_mib(self.most_memory)} with {_mib(self.weights)} of weights")
        if self.memory.late - self.memory.warm > BUDGET_BYTES:
            found.append(f"MLX's memory grew from {_mib(self.memory.warm)} to {_mib(self.memory.late)}")
        before, after = self.descriptors
        if before is not None and after is not None and after > before:
            found.append(f"{after} descriptors are open where there were {before}")
        if self.captured:
            found.append(f"a host would take this for an error: {self.captured!r}")
        return found

    def table(self) -> str:
        """For a person."""
        tally, checker, cuts = self.tally, self.checker, quantiles(self.latencies, n=1000)
        share = tally.cached_tokens / max(tally.prompt_tokens, 1)
        rows = {
            "answers": f"{tally.answers}, {checker.checked} of them checked, {len(checker.wrong)} wrong,"
            f" {checker.ties} ties",
            "prompts": f"{tally.prompt_tokens} tokens, {share:.1%} from the cache",
            "actions": ", ".join(f"{name} {count}" for name, count in tally.done.most_common()),
            "status": f"{len(self.latencies)} asked, median {cuts[499] * 1e3:.1f} ms, 99 % {cuts[989] * 1e3:.1f} ms,"
            f" longest {max(self.latencies) * 1e3:.0f} ms, {_slow(self.latencies)} over {QUICK_S * 1e3:.0f} ms"
            f" ({_slow(self.own)} without the waiting for a core)",
            "resident": _trend(self.rss),
            "MLX memory": f"{_trend(self.memory)}, at most {_mib(self.most_memory)}",
            "descriptors": "{} before, {} after".format(*self.descriptors),
            "output": f"{len(self.captured.splitlines())} lines that a host would take for an error",
            "end": f"{self.exit_s:.2f} s after the signal",
        }
        return "\n".join(f"  {name:<12} {text}" for name, text in rows.items())

    def data(self) -> dict[str, object]:
        """For JSON; bytes, seconds, bytes a minute."""
        return {
            "minutes": self.plan.minutes,
            "kind": self.plan.kind,
            "cache": self.plan.cache,
            "clients": self.plan.clients,
            "seed": self.plan.seed,
            "answers": self.tally.answers,
            "checked": self.checker.checked,
            "wrong": self.checker.wrong,
            "ties": self.checker.ties,
            "prompt_tokens": self.tally.prompt_tokens,
            "cached_tokens": self.tally.cached_tokens,
            "actions": dict(self.tally.done),
            "status": {
                "count": len(self.latencies),
                "longest_s": max(self.latencies),
                "slow": _slow(self.latencies),
                "slow_by_itself": _slow(self.own),
            },
            "rss": self.rss._asdict(),
            "memory": self.memory._asdict() | {"most": self.most_memory},
            "descriptors": self.descriptors,
            "failures": self.failures,
        }


def soak(plan: Plan, say: Callable[[str], None]) -> Soaked:
    """Spawns both runners, lets the clients loose and measures. Raises `LoadError` when a runner does not start,
    `EndedError` when it ends early."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-runner-soak-")))
        source = write_checkpoint(directory / "source", plan.kind, seed=plan.seed)
        _keep_readable(source)
        store = write_store(directory / "models", MODEL, source).models_dir

        def start(command: Sequence[str], cache: str) -> Process:
            environment = {
                "MLX_RUNNER_CACHE": cache,
                "MLX_RUNNER_CACHE_MEMORY": str(BUDGET_BYTES),
                "MLX_RUNNER_PREFILL_CHUNK": "128",
            }
            process = spawn(command, MODEL, models_dir=store, generation=G, environment=environment)
            stack.callback(process.kill)
            process.wait_ready(60)
            return process

        return asyncio.run(_measure(plan, start(plan.command, plan.cache), start(OURS, "none"), say))


async def _measure(plan: Plan, process: Process, reference: Process, say: Callable[[str], None]) -> Soaked:
    tally = Tally()
    async with Client.of(process) as client:
        weights = (await client.status()).memory
    before = descriptors(process.pid)
    meter = Meter(process)
    meter.start()
    async with Client.of(process) as client, Client.of(reference) as asked:
        checker = Checker(asked)
        checking = asyncio.create_task(checker.run())
        until = time.monotonic() + plan.minutes * 60
        visitors = [Visitor(number, plan.seed, client, checker, tally) for number in range(plan.clients)]
        visits = [asyncio.create_task(visitor.run(until)) for visitor in visitors]
        while (left := until - time.monotonic()) > 0:
            await asyncio.wait(visits, timeout=min(left, _SAY_EVERY_S))
            found = len(tally.faults) + len(checker.wrong)
            say(f"{max(left - _SAY_EVERY_S, 0):4.0f} s left: {tally.answers} answers, {found} faults")
            if process.exit_status is not None:
                raise EndedError(f"exit status {process.exit_status}: {' '.join(process.output.lines[-1:])}")
        await asyncio.gather(*visits)
        meter.stop()
        await checker.finish()
        checking.cancel()
    after = settled(partial(descriptors, process.pid), before)
    return Soaked(
        plan=plan,
        tally=tally,
        checker=checker,
        latencies=meter.latencies,
        own=meter.own,
        rss=Trend.of(meter.rss),
        memory=Trend.of(meter.memory),
        most_memory=round(max(value for _, value in meter.memory)),
        weights=weights,
        descriptors=(before, after),
        captured=process.output.captured,
        faults=meter.faults,
        exit_s=process.close(),
    )


def _keep_readable(directory: Path) -> None:
    """Keeps bytes that are no text out of the answers: a prompt that holds them would not become the same tokens."""
    path = directory / "generation_config.json"
    unreadable = [*range(32), *range(127, 256)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "suppress_tokens": unreadable}))


def _slow(latencies: Sequence[float]) -> int:
    return sum(latency > QUICK_S for latency in latencies)


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _trend(trend: Trend) -> str:
    return f"{_mib(trend.warm)} when warm, {_mib(trend.late)} at the end, {_mib(trend.per_minute)} a minute"


def main() -> None:
    """The command line; exit status 1 when something was not as it must be, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("minutes", type=float, metavar="MINUTES")
    parser.add_argument("--kind", choices=get_args(Kind), default=Plan.kind, help="of model (default: %(default)s)")
    parser.add_argument("--cache", choices=CACHE_KINDS, default=Plan.cache, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=Plan.clients, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Plan.seed, help="of model and clients (default: %(default)s)")
    parser.add_argument("--runner", metavar="COMMAND", help="another runner than this repository's")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    if not arguments.minutes >= 0.1 or arguments.clients < 1:
        parser.error("at least 0.1 MINUTES and one client")
    plan = Plan(
        minutes=arguments.minutes,
        kind=arguments.kind,
        cache=arguments.cache,
        clients=arguments.clients,
        seed=arguments.seed,
        command=shlex.split(arguments.runner) if arguments.runner else OURS,
    )
    print(f"{plan.minutes:g} minutes, {plan.clients} clients, {plan.kind}, --cache {plan.cache}", file=sys.stderr)
    try:
        soaked = soak(plan, lambda text: print(text, file=sys.stderr))
    except LoadError as error:
        sys.exit(f"The runner did not start: {error}")
    except EndedError as error:
        sys.exit(f"FAILED: the runner ended: {error}")
    print(json.dumps(soaked.data()) if arguments.json else soaked.table())
    failures = soaked.failures
    for failure in failures[:_SHOWN]:
        print(f"FAILED: {failure}", file=sys.stderr)
    if len(failures) > _SHOWN:
        print(f"... and {len(failures) - _SHOWN} more", file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
