"""Models as clients see them: the conformance suite, speed beside others, drafts, and memory at its limit.

Runners whose answers are checked are recorded, so that whoever reads the file can see what they computed.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx

from runner.device import device, usable_bytes
from scripts.tools import ROOT
from scripts.tools.bench import drafts
from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.parallel import DECODE, STREAM_TOKENS, decode
from scripts.tools.bench.report import Rounds, interleave
from scripts.tools.bench.servers import (
    BARE,
    SHORT_TOKENS,
    SIZES,
    Endpoint,
    MismeasuredError,
    random_model,
    serve,
    servers,
)
from scripts.tools.bench.ttft import CASES as FIRST_TOKENS
from scripts.tools.bench.ttft import bare_times, served_times
from scripts.tools.conformance import CASES, Runners, run
from scripts.tools.conformance.runners import NotReadyError
from scripts.tools.conformance.this_runner import FAULTY, RUNNER
from scripts.tools.device.parts import Row
from scripts.tools.host.lib import GENERATIONS, LoadError, StatusError
from scripts.tools.soak.main import Plan, soak

_STREAMS = (1, 4, 8)
_SEED = 1
_SMALL_BYTES, _LARGE_BYTES = 8 << 30, 64 << 30
"""The memory that models of 0.7 and 2.8 billion parameters need, in each of three programs."""
_GPU_MEMORY = "+64MiB"
"""Beyond the weights: matrix products on NVIDIA GPUs alone take up to 32 MiB."""
_TEXT = {str(number) for number in range(15, 81)} - {"32", "33"}
_MEDIA = "33-", "12.39", "12.41", "12.56", "12.62", "12.63", "12.71", "12.76"
"""Cases by the numbers of the protocol: of texts, and of pictures, sounds, scores and embeddings."""


def conformance(*, tiny: bool) -> Iterator[Row]:
    """Yields a row for each case that computes something, as the latest hosts ask."""
    generation = GENERATIONS[-1]
    cases = [case for case in CASES if not case.slow and not case.excuse(generation)]
    texts = [case for case in cases if case.id.partition("-")[0] in _TEXT]
    media = [case for case in cases if case.id.startswith(_MEDIA)]
    for tape, chosen in (("text", texts), ("", media)):
        with recorded(tape), Runners(RUNNER, faulty=FAULTY, cwd=ROOT) as runners:
            for case in chosen[:3] if tiny else chosen:
                found = asyncio.run(run(case, runners, generation))
                if isinstance(found.error, NotReadyError):  # kernels were compiled, which are there from now on
                    runners.renew()
                    found = asyncio.run(run(case, runners, generation))
                good = case.beyond or found.mark != "fail"
                yield Row(case.id, found.reason or found.mark, good, {"seconds": round(found.seconds, 2)})


def speed(*, tiny: bool) -> Iterator[Row]:
    """Yields the figures of a model that fits this device."""
    yield from contenders("1M" if tiny else size_here(), 2 if device() == "gpu" else 1)


def large(*, tiny: bool) -> Iterator[Row]:
    """Yields the figures of a model of 2.8 billion parameters, if it fits."""
    if large_fits() and not tiny:
        yield from contenders("3B", 1)
    else:
        yield Row("3B", f"left out: it needs a GPU with {_LARGE_BYTES / 1e9:.0f} GB")


def size_here() -> str:
    """Returns the size of a model that three programs can have at once."""
    return "700M" if device() == "gpu" and usable_bytes() > _SMALL_BYTES else "10M"


def large_fits() -> bool:
    """Returns True if three programs can have a model of 2.8 billion parameters at once."""
    return device() == "gpu" and usable_bytes() > _LARGE_BYTES


def contenders(size: str, turns: int) -> Iterator[Row]:
    """Yields a row for our runner, mlx_lm.server and the bare loop: tokens per second of all streams, and milliseconds
    to the first token. A server of others that fails is left out."""
    try:
        found = measured(size, turns, alone=False)
    except (MismeasuredError, StatusError, ValueError) as error:
        yield Row("others", f"left out: {error}")
        found = measured(size, turns, alone=True)
    rounds, cases = Rounds(found), (*map(DECODE, _STREAMS), *FIRST_TOKENS)
    for name, cells in rounds.rows(cases).items():
        figures = {case: rounds.median(name, case) for case in cases}
        text = ", ".join(f"{case} {cell}" for case, cell in zip(cases, cells, strict=True))
        yield Row(f"{size}, {name}", text, figures=figures)


def measured(size: str, turns: int, *, alone: bool) -> Mapping[str, list[dict[str, float]]]:
    prompts = Prompts(_SEED)
    with asyncio.Runner() as loop, ExitStack() as stack:
        chosen = servers(_options(turns), say, max(_STREAMS))[: 1 if alone else None]
        bare = BareLoop(SIZES[size], _SEED, stack)
        model = random_model(SIZES[size], _SEED, stack)
        mx.clear_cache()  # its memory is for the servers
        served = serve(model, chosen, stack, loop)

        async def ask(endpoint: Endpoint) -> dict[str, float]:
            speeds = {DECODE(streams): await decode(endpoint, prompts, streams) for streams in _STREAMS}
            return {**speeds, **(await served_times(endpoint, prompts)).ms}

        def asked(endpoint: Endpoint) -> dict[str, float]:
            return loop.run(ask(endpoint))

        def looped() -> dict[str, float]:
            rows = {streams: [prompts.ids(SHORT_TOKENS) for _ in range(streams)] for streams in _STREAMS}
            speeds = {DECODE(streams): bare.decode(rows[streams], STREAM_TOKENS) for streams in _STREAMS}
            return {**speeds, **bare_times(bare, prompts).ms}

        return interleave({**{name: partial(asked, one) for name, one in served.items()}, BARE: looped}, turns)


def drafted(*, tiny: bool) -> Iterator[Row]:
    """Yields tokens per second of answers that repeat themselves, with drafts and without."""
    cases = ["repeat 1"] if tiny else ["repeat 1", "repeat 4"]
    report = drafts.run(_options(1, case=cases, size="1M" if tiny else size_here()), say)
    for table in report.tables:
        for case, *cells in table.rows:
            yield Row(
                case, ", ".join(f"{column} {cell}" for column, cell in zip(table.columns[1:], cells, strict=True))
            )


def limits(*, tiny: bool) -> Iterator[Row]:
    """Yields how random clients fared with little memory, and with a disk cache beside: every answer is checked."""
    minutes, memory = 0.1 if tiny else 0.25, "+5MiB" if device() == "cpu" else _GPU_MEMORY
    with tempfile.TemporaryDirectory() as disk:
        variables = {"memory": (), "memory and disk": (f"MLX_RUNNER_DISK_CACHE={disk}",)}
        for name in [*variables][1 if tiny else 0 :]:
            command = ["env", *variables[name], *RUNNER]
            plan = Plan(minutes, "qwen3_next", memory=memory, clients=2, command=command)
            with recorded("" if variables[name] else name):
                try:
                    soaked = soak(plan, say)
                except LoadError:  # as above
                    soaked = soak(plan, say)
            wrong = soaked.faults_beside_time
            yield Row(name, "; ".join([*wrong, soaked.table()]), not wrong)


@contextmanager
def recorded(name: str) -> Iterator[None]:
    """Has runners that start in the block record what they compute; not if there is no name."""
    folder = os.environ.get("DEVICE_TAPES")
    if folder and name:
        os.environ["MLX_RUNNER_RECORD"] = str(Path(folder, f"{name}.tape"))
    try:
        yield
    finally:
        os.environ.pop("MLX_RUNNER_RECORD", None)


def say(text: str) -> None:
    """Shows progress: its last lines are in the file if the part fails."""
    print(text, file=sys.stderr, flush=True)


def _options(turns: int, **others: object) -> argparse.Namespace:
    """Returns the options of a benchmark."""
    return argparse.Namespace(turns=turns, seed=_SEED, peer=[], ollama=None, **others)
