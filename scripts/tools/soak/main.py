"""Runs random clients against one runner: chats, branches, cancels and retries, all at once.

Answers are compared with those of a second runner of the same model that has no cache. It also checks that
memory and descriptors do not grow, that the status stays quick, and that the output holds nothing that a host would
take for an error. Exit status 0 only if all of that held.
"""

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from runner.cache import CACHE_KINDS
from runner.sizes import parse_bound
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import F_SECOND, Client, LoadError, Process, descriptors, spawn
from scripts.tools.models.checkpoints import Kind
from scripts.tools.models.tensors import Quantization
from scripts.tools.real.main import model_or_exit
from scripts.tools.soak.checker import Checker
from scripts.tools.soak.clients import Tally, Visitor
from scripts.tools.soak.meter import Meter, Trend, memory_told, metrics_faults, settled
from scripts.tools.soak.subject import REAL, Subject, made_subject, real_subject
from scripts.tools.soak.verdict import Soaked

_SAY_EVERY_S = 10.0
_SHOWN = 5


class EndedError(Exception):
    """A runner ended before its time."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run; a model kind is one of scripts/tools/models/checkpoints.py, or the real model."""

    minutes: float
    kind: Kind | Literal["real"] = "falcon_h1"
    packed: Quantization | None = None
    """The form of the weights of a made model. Answers of packed ones are equal to the last bit."""
    cache: str = "trie"
    clients: int = 6
    seed: int = 0
    memory: str | None = None
    """The memory for everything, as `--memory` takes it; with a plus in front, the memory beyond the weights."""
    command: Sequence[str] = RUNNER


def soak(plan: Plan, say: Callable[[str], None]) -> Soaked:
    """Spawns both runners, lets the clients loose and measures. Raises `LoadError` when a runner does not start,
    `EndedError` when it ends early. On SIGINT or SIGTERM it ends with what there is."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-runner-soak-")))
        subject = _subject(plan, directory)

        def start(command: Sequence[str], cache: str, memory_bytes: int | None = None) -> Process:
            environment = {
                "MLX_RUNNER_CACHE": cache,
                "MLX_RUNNER_CACHE_MEMORY": str(subject.limits.cache),
                "MLX_RUNNER_PREFILL_CHUNK": "128",
            }
            if memory_bytes is not None:  # which is what bounds the cache then
                environment |= {"MLX_RUNNER_MEMORY": str(memory_bytes), "MLX_RUNNER_CACHE_MEMORY": "100%"}
            process = spawn(
                command, subject.model, models_dir=subject.models_dir, generation=F_SECOND, environment=environment
            )
            stack.callback(process.kill)
            process.wait_ready(60)
            return process

        reference = start(RUNNER, "none")
        memory = _memory_bytes(plan.memory, reference.port)
        process = start(plan.command, plan.cache, memory)
        return asyncio.run(_measure(plan, subject, process, reference, memory, say))


def _subject(plan: Plan, directory: Path) -> Subject:
    if plan.kind == REAL:
        return real_subject(directory, model_or_exit("scripts/soak"))
    return made_subject(directory, plan.kind, plan.seed, plan.packed)


def _memory_bytes(wanted: str | None, port: int) -> int | None:
    """Returns the wanted amount; for "+N", N beyond the weights, which the runner at that port reports."""
    if wanted is None:
        return None
    amount = parse_bound(wanted.removeprefix("+")).bytes
    if amount is None:
        raise ValueError(f"{wanted!r} is no amount of memory")
    return amount + (memory_told(port).weights if wanted.startswith("+") else 0)


async def _measure(
    plan: Plan, subject: Subject, process: Process, reference: Process, memory: int | None, say: Callable[[str], None]
) -> Soaked:
    tally, stopped = Tally(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Client.of(process) as client:
        weights = (await client.status()).memory
        await client.send("GET", "/metrics")  # the first one imports what it needs
    before = descriptors(process.pid)
    meter = Meter(process, lambda: tally.answers)
    meter.start()
    async with Client.of(process) as client, Client.of(reference) as asked:
        checker = Checker(asked, exact=plan.packed is not None)
        checking = asyncio.create_task(checker.run())
        until = time.monotonic() + plan.minutes * 60
        visitors = [Visitor(number, plan.seed, client, checker, tally, subject) for number in range(plan.clients)]
        visits = asyncio.gather(*(visitor.run(until) for visitor in visitors))
        try:
            while (left := until - time.monotonic()) > 0 and not stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), min(left, _SAY_EVERY_S))
                found = len(tally.faults) + len(checker.wrong)
                say(f"{max(until - time.monotonic(), 0):4.0f} s left: {tally.answers} answers, {found} faults")
                _check_running(process, reference)
            if not stopped.is_set():
                await visits
        finally:
            visits.cancel()
            await asyncio.gather(visits, return_exceptions=True)
            meter.stop()
        await checker.finish()
        checking.cancel()
        faults = ["it was stopped early"] if stopped.is_set() else await metrics_faults(client, tally.answers)
    peak = memory_told(process.port).peak if memory is not None else None
    after = settled(partial(descriptors, process.pid), before)
    _check_running(process, reference)
    exit_s = process.close()
    return Soaked(
        cache=plan.cache,
        concurrent=plan.cache == "trie" and plan.clients > 1,
        tally=tally,
        checker=checker,
        latencies=meter.latencies,
        own=meter.own,
        rss=Trend.of(meter.rss),
        memory=Trend.of(meter.memory),
        most_memory=round(max((value for _, value in meter.memory), default=0)),
        weights=weights,
        limits=subject.limits,
        budget=memory,
        peak=peak,
        descriptors=(before, after),
        captured=process.output.captured,
        faults=[*meter.faults, *faults],
        exit_s=None if process.exit_status == -signal.SIGKILL else exit_s,
    )


def _check_running(process: Process, reference: Process) -> None:
    for name, each in (("the runner", process), ("the runner without a cache", reference)):
        if each.exit_status is not None:
            last = " ".join(each.output.lines[-1:])
            raise EndedError(f"{name} ended with exit status {each.exit_status}: {last}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("minutes", type=float, metavar="MINUTES", help="duration")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--kind",
        choices=get_args(Kind),
        default=Plan.kind,
        help="kind of model, made for the run (default: %(default)s)",
    )
    model.add_argument(
        "--real",
        action="store_const",
        dest="kind",
        const=REAL,
        help="a real model of 135 M parameters instead, fetched once (93 MB)",
    )
    parser.add_argument(
        "--packed",
        choices=get_args(Quantization),
        help="pack the weights of a made model; its answers have to be equal to the last bit",
    )
    parser.add_argument("--cache", choices=CACHE_KINDS, default=Plan.cache, help="kind of cache (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=Plan.clients, help="clients at once (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=Plan.seed, help="seed of made models and of clients (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", metavar="BYTES|+BYTES", help="memory for everything; with a plus, memory beyond the weights"
    )
    parser.add_argument(
        "--runner",
        dest="command",
        type=shlex.split,
        default=RUNNER,
        metavar="COMMAND",
        help="another runner (default: this repository's)",
    )
    arguments = parser.parse_args()
    if not arguments.minutes >= 0.1 or arguments.clients < 1:
        parser.error("at least 0.1 MINUTES and one client")
    if not arguments.command:
        parser.error("--runner: a command is wanted")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = Plan(**vars(arguments))
    print(f"{plan.minutes:g} minutes, {plan.clients} clients, {plan.kind}, --cache {plan.cache}", file=sys.stderr)
    try:
        soaked = soak(plan, lambda text: print(text, file=sys.stderr))
    except LoadError as error:
        sys.exit(f"The runner did not start: {error}")
    except EndedError as error:
        sys.exit(f"FAILED: {error}")
    print(soaked.table())
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
