"""`scripts/bench trace`: the prefix cache beside the optimum, on traces of agents, chats and retrieval.

`--engine policy`, the default, simulates: the product's own cache over layers with the proportions of real models, at
seconds for a trace. A budget is a share of the working set: all tokens, and a restore point wherever a prompt leaves
what was known. Figures are tokens computed beyond the least, which a cache computes that forgets nothing and goes on
from any token:

best known  the best of all here, and of two that know the future: Belady's rule (exact for kv), and points packed into
            memory and time
ours        this runner's cache, as it is
LRU         this runner's checkpoints; the leaf goes first whose path was used least recently
Ollama's    the checkpoints and the order of Ollama's own runner
blocks      of 256 tokens, as servers with paged attention keep them; with states as many tokens as a state has bytes

kv, w128, w1024, hyb   the layers of Llama-3.1-8B, gpt-oss-20b, gemma-3-12b and Qwen3.5-9B, with keys of 16 bits

`--engine runner` sends the trace to a real runner: the time to the first token by turn of a session, cached tokens over
those that an ideal cache has, gaps between tokens, bytes a cached token. Without `--model` it makes small models of the
same kinds. `--compare` replays the same tokens in simulation, and counts requests with equal cached tokens.

With --turns N the seeds are N, from --seed on.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from runner.device import device
from runner.settings import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS
from scripts.tools.bench.report import Report, Table, Target
from scripts.tools.bench.servers import OURS, this_runner
from scripts.tools.bench.traces import form, served
from scripts.tools.bench.traces.bounds import Paths, best, blocks
from scripts.tools.bench.traces.form import BLOCK_TOKENS, Request
from scripts.tools.bench.traces.generator import SITUATIONS, edited, generate
from scripts.tools.bench.traces.served import Run
from scripts.tools.bench.traces.simulated import KINDS, POLICIES, Played, Simulation

BEST, BLOCKS = "best known", "blocks"
COLUMNS = (BEST, *POLICIES, BLOCKS)
PERCENTS = (10, 25, 50, 100)
OF_BEST = {
    ("hyb", 25): 1.5,
    ("hyb", 50): 6.0,
    ("kv", 25): 1.15,
    ("kv", 50): 1.2,
    ("w1024", 25): 3.5,
    ("w1024", 50): 9.0,
}
"""At most, by kind and percent: tokens beyond the least over those of the best known, or over 1 % of the least, if that
is more: the best known of a small trace is often zero."""
HYB_100_TOKENS, EDIT_TOKENS, FORWARDS, BESIDE = 90_000, 500, 1.5, 1.0
EQUAL = 0.99
_RUNNER_SCALE = 1 / 16
_EDITED = 11  # of 40 messages


class Row(NamedTuple):
    """A trace under one budget: the least tokens, those that each policy computes, and what the cache did."""

    trace: str
    seed: int
    kind: str
    percent: int
    requests: int
    least: int
    computed: Mapping[str, int]
    cold_forwards: tuple[int, int]
    """Over prompts of which nothing was cached; as many as without checkpoints."""
    beside: float
    """The most bytes held beside the paths of running requests, over the budget."""


def measured(
    name: str, seed: int, requests: Sequence[Request], kind: str, percents: Iterable[int], parallel: int
) -> list[Row]:
    """Simulates a trace under each budget."""
    layers, paths, rows = KINDS[kind], Paths(requests), list[Row]()
    for percent in percents:
        budget = paths.working_set(layers) * percent // 100
        played = {policy: Simulation(layers, budget, policy).play(requests, parallel) for policy in POLICIES}
        computed = {policy: computed_tokens(requests, each) for policy, each in played.items()}
        computed[BLOCKS] = blocks(requests, layers, budget)
        computed[BEST] = min(best(paths, layers, budget), *computed.values())
        cold = [(len(each.prompt), ours) for each, ours in zip(requests, played[OURS], strict=True) if not ours.cached]
        forwards = (
            sum(ours.forwards for _, ours in cold),
            sum(-(-(length - 1) // GPU_CHUNK_TOKENS) for length, _ in cold),
        )
        beside = max(each.others_bytes for each in played[OURS]) / budget
        rows.append(Row(name, seed, kind, percent, len(requests), paths.least, computed, forwards, beside))
    return rows


def computed_tokens(requests: Sequence[Request], played: Sequence[Played]) -> int:
    return sum(len(each.prompt) - ours.cached for each, ours in zip(requests, played, strict=True))


def edit_tokens(kind: str, seed: int) -> int:
    """Returns the tokens that are computed again where a message of a long conversation is edited."""
    requests = edited(seed, _EDITED)
    return Paths(requests).matched[-1] - Simulation(KINDS[kind], None).play(requests)[-1].cached


def policy_report(rows: Sequence[Row], edit: int) -> Report:
    """Returns the results of simulations; `edit` is what `edit_tokens` found."""
    sums: dict[tuple[str, int], Counter[str]] = {}
    by_trace: dict[tuple[str, str], dict[int, Counter[str]]] = {}
    for row in rows:
        beyond = {name: row.computed[name] - row.least for name in COLUMNS}
        for each in (
            sums.setdefault((row.kind, row.percent), Counter()),
            by_trace.setdefault((row.trace, row.kind), {}).setdefault(row.percent, Counter()),
        ):
            each.update(beyond)
    least = sum({(row.trace, row.seed): row.least for row in rows}.values())
    targets = [
        Target(
            f"{kind} {percent} %, tokens beyond the least, over the best known's",
            each[OURS] / max(1, least / 100, each[BEST]),
            bound,
        )
        for (kind, percent), each in sums.items()
        if (bound := OF_BEST.get((kind, percent)))
    ]
    if ("hyb", 100) in sums:
        targets.append(Target("hyb 100 %, tokens beyond the least", sums["hyb", 100][OURS], HYB_100_TOKENS))
    forwards, plain = (sum(each) for each in zip(*(row.cold_forwards for row in rows), strict=True))
    targets += [
        Target(f"hyb, message {_EDITED} of 40 edited, tokens before it computed again", edit, EDIT_TOKENS),
        Target("cold prompts, forwards over those without points", forwards / max(1, plain), FORWARDS),
        Target("bytes held beside running requests, over the budget", max(row.beside for row in rows), BESIDE),
    ]
    percents = [*dict.fromkeys(row.percent for row in rows)]
    cells = [
        [trace, kind, *(f"{each[OURS] / 1e3:,.1f} / {each[BEST] / 1e3:,.1f}" for each in found.values())]
        for (trace, kind), found in by_trace.items()
    ]
    requests = sum({(row.trace, row.seed): row.requests for row in rows}.values())
    tables = [
        Table(
            f"thousands of tokens beyond the least, {requests:,} requests",
            ("", *COLUMNS),
            [
                [f"{kind} {pc} %", *(f"{each[name] / 1e3:,.0f}" for name in COLUMNS)]
                for (kind, pc), each in sums.items()
            ],
        ),
        Table("the same by trace: ours / best known", ("", "kind", *(f"{each} %" for each in percents)), cells),
    ]
    return Report(targets, tables, {"rows": [row._asdict() for row in rows], "edit_tokens": edit})


_TURNS = {"cold": (0, 0), "turn 1": (1, 1), "turns 2 to 5": (2, 5), "later turns": (6, 1 << 30)}


class Found(NamedTuple):
    """A trace on a real runner, and the cached tokens of the same requests in simulation, if they were compared."""

    trace: str
    run: Run
    simulated: Sequence[int] = ()


def runner_report(found: Sequence[Found]) -> Report:
    """Returns the results of replays on a real runner."""
    times, reuse, targets = list[list[str]](), list[list[str]](), list[Target]()
    for name, run, simulated in found:
        for row, (first, last) in _TURNS.items():
            first_ms = [1e3 * each.first_s for each in run.answers if first <= each.turn <= last]
            if first_ms:
                p50, p95 = _percentiles(first_ms)
                times.append([name, row, f"{len(first_ms)}", f"{p50:,.0f}", f"{p95:,.0f}"])
        paths = Paths(run.requests)
        cached = [each.cached for each in run.answers[: len(run.requests)]]
        gaps = _percentiles([1e3 * gap for each in run.answers for gap in each.gaps_s] or [0.0])
        share = sum(cached) / max(1, sum(paths.matched))
        cells = [f"{sum(cached):,}", f"{sum(paths.matched):,}", f"{share:.3f}", *(f"{gap:,.0f}" for gap in gaps)]
        per_token = run.held_bytes / max(1, run.held_tokens)
        reuse.append([name, *cells, f"{per_token:,.0f}", f"{run.prompt_forwards:,}", f"{run.steps:,}"])
        if simulated:
            equal = sum(one == other for one, other in zip(cached, simulated, strict=True)) / len(cached)
            targets.append(
                Target(f"{name}, requests with as many cached tokens as simulated", equal, EQUAL, most=False)
            )
    tables = [
        Table("ms to the first token", ("", "", "requests", "p50", "p95"), times),
        Table(
            "reuse, and the gaps between tokens",
            ("", "cached", "ideal", "share", "gap p50 ms", "p95 ms", "bytes a token", "forwards", "steps"),
            reuse,
        ),
    ]
    figures = [{"trace": each.trace, "simulated": each.simulated, **each.run.figures()} for each in found]
    return Report(targets, tables, {"traces": figures})


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and the value below which 95 of 100 lie."""
    ordered = sorted(values)
    return median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("policy", "runner"), default="policy", help="(default: %(default)s)")
    parser.add_argument("--only", action="append", choices=SITUATIONS, help="this trace only; may be repeated")
    parser.add_argument("--file", action="append", type=Path, help="a trace in Mooncake's form; may be repeated")
    parser.add_argument(
        "--block-size", type=int, default=BLOCK_TOKENS, metavar="N", help="tokens of its blocks (default: %(default)s)"
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the traces into this folder, too")
    parser.add_argument("--kind", action="append", choices=KINDS, help="these layers only; may be repeated")
    parser.add_argument(
        "--percent", action="append", type=int, metavar="N", help="this budget only; may be repeated; a runner has none"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="requests at once (default: %(default)s)")
    parser.add_argument("--scale", type=float, metavar="X", help="texts are so many times as long (a runner: 1/16)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="what the runner opens")
    parser.add_argument("--compare", action="store_true", help="the runner with the simulation")


def traces_of(arguments: argparse.Namespace, seed: int) -> dict[str, list[Request]]:
    """Returns the traces by name. Raises ValueError for a file that is none."""
    scale = arguments.scale or (_RUNNER_SCALE if arguments.engine == "runner" else 1.0)
    names = arguments.only or ([] if arguments.file else SITUATIONS)
    found = {name: generate(name, seed, scale) for name in names}
    for path in arguments.file or ():
        try:
            found[path.stem] = form.read(path.read_text().splitlines(), arguments.block_size)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
    if arguments.write:
        for name, requests in found.items():
            lines = form.lines_of(requests, arguments.block_size)
            (arguments.write / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return found


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark. Raises ValueError if the options make no sense, or the runner does not start."""
    compared = arguments.engine == "runner" and device() == "cpu" and not arguments.model and arguments.parallel == 1
    if arguments.compare and not compared:
        raise ValueError("--compare is for --engine runner on a CPU with models that are made, one request at a time")
    seeds = range(arguments.seed, arguments.seed + arguments.turns)
    if arguments.engine == "runner":
        return runner_report([each for seed in seeds for each in _replayed(arguments, seed, say)])
    rows = []
    for seed in seeds:
        for name, requests in traces_of(arguments, seed).items():
            for kind in arguments.kind or KINDS:
                say(f"{name}, seed {seed}, {kind} ...")
                percents = arguments.percent or PERCENTS
                rows += measured(name, seed, requests, kind, percents, arguments.parallel)
    return policy_report(rows, edit_tokens("hyb", arguments.seed))


def _replayed(arguments: argparse.Namespace, seed: int, say: Callable[[str], None]) -> Iterator[Found]:
    chunk = CPU_CHUNK_TOKENS if device() == "cpu" else GPU_CHUNK_TOKENS
    server = this_runner(OURS, arguments.parallel)
    server.environment.update({"MLX_RUNNER_DRAFT_KNOWN": "off", "MLX_RUNNER_PREFILL_CHUNK": str(chunk)})
    with TemporaryDirectory(prefix="bench-") as work:
        for kind in ["given"] if arguments.model else arguments.kind or KINDS:
            if arguments.model:
                model = served.Model(arguments.model, served.CHAT_ML)
            else:
                Path(work, kind).mkdir()
                model, (layers, unit) = served.made(kind, seed, Path(work, kind)), served.unit_of(kind)
            for trace, requests in traces_of(arguments, seed).items():
                for percent in [None] if arguments.model else arguments.percent or [None]:
                    name = f"{trace}, {kind}" + (f" {percent} %" if percent else "")
                    say(f"{name} ...")
                    budget = Paths(requests).working_set(layers) * percent // 100 if percent else None
                    limit = {"MLX_RUNNER_CACHE_MEMORY": str(budget * unit)} if budget else {}
                    found = served.serve(model, requests, arguments.parallel, limit, server)
                    if not arguments.compare:
                        yield Found(name, found)
                        continue
                    simulation = Simulation(layers, budget, chunk=chunk, steps=1, turn=served.MADE_TURN)
                    # The last token of an answer was drawn, but not computed.
                    spoken = [each._replace(answer=each.answer[:-1]) for each in found.requests]
                    yield Found(name, found, [each.cached for each in simulation.play(spoken)])
