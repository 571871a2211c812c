"""`scripts/bench cache`: prefix caches side by side, on one model for every kind of layer cache.

Several agents ask one model (`agent_trace`). Every request is served over each cache, in an order that rotates from
request to request, so that noise of the machine hits all alike; the answer of the first one goes on in the
conversations. All answers are drawn with the same seeds and should be equal: a difference is counted, for rounding can
tip a draw over when chunk boundaries differ.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import NamedTuple, Protocol

import mlx.core as mx

from runner.cache import CACHE_KINDS
from runner.model.weights.dtype import device
from scripts.tools.bench.cache.agent_trace import AgentTrace, Ask, Workload
from scripts.tools.bench.cache.contender import Contender, LayerBytes, Served
from scripts.tools.bench.cache.figures import Costs, Losses
from scripts.tools.bench.cache.models import KINDS, Size, Subject, make_subject
from scripts.tools.bench.cache.prefixes import Anywhere, FixedPoints, Reuse, Shown
from scripts.tools.bench.cache.report import CacheReport
from scripts.tools.bench.cache.rows import BEST, ModelReport, Row
from scripts.tools.bench.common.options import names_of, size_bytes

_CACHES = ("none", "single", "trie")
_PEERS: dict[str, Callable[[], Anywhere | FixedPoints]] = {
    BEST: Anywhere,
    "grid 8192": FixedPoints,
    "+ branches": lambda: FixedPoints(branches=True),
}
"""What the same requests would have cost where nothing is evicted, by arithmetic: `Losses` without `Costs`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings. `chunk_tokens` is the length of prefill forwards, a quarter of the runner's as the prompts are."""

    workload: Workload = field(default_factory=Workload)
    models: Sequence[str] = tuple(KINDS)
    caches: Sequence[str] = _CACHES
    hidden: int = 256
    layers: int = 2
    chunk_tokens: int = 512
    budget_bytes: int | None = None


class Exchange(NamedTuple):
    """One request and how each contender served it."""

    ask: Ask
    served: list[Served]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    usual = Options()
    parser.epilog = _JSON
    parser.add_argument(
        "--model",
        action="append",
        choices=KINDS,
        metavar="KIND",
        help="run this one only, may be repeated: "
        + "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items()),
    )
    parser.add_argument(
        "--caches",
        type=names_of(CACHE_KINDS),
        default=",".join(_CACHES),
        metavar="KIND,...",
        help="the contenders; conversations go on with the answers of the first (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-memory",
        type=lambda text: size_bytes(text, mx.get_memory_limit()),
        metavar="BYTES|N%",
        help="bound of each cache: 8MiB, 1G, or a share of MLX's memory limit (default: none)",
    )
    parser.add_argument(
        "--hidden", type=int, default=usual.hidden, metavar="N", help="width of the models (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=usual.layers, metavar="N", help="their layers (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        default=usual.chunk_tokens,
        metavar="TOKENS",
        help="prompt tokens per forward (default: %(default)s)",
    )
    group = parser.add_argument_group("workload", "lengths in tokens; messages vary around the median given")
    for option in fields(Workload):
        if option.name != "seed":
            group.add_argument(
                f"--{option.name.replace('_', '-')}",
                type=type(option.default),
                default=option.default,
                metavar="N",
                help=f"{_MEANINGS[option.name]} (default: %(default)s)",
            )


_JSON = """
JSON: benchmark, machine (what it ran on), workload, chunk_tokens, budget_bytes, models. For each model: model,
parameters, bytes_per_token, bytes_per_state, counts, operations (what led to each request), caches, arithmetic. For
each cache the figures that cache/figures.py explains (Losses, Costs) and requests, with one value for each request
in total, matched, cached, computed, ttft_ms, ms and held_bytes; for each line of arithmetic those of Losses."""
_MEANINGS = {
    "requests": "requests in all",
    "agents": "agents",
    "systems": "system prompts that they share",
    "system_tokens": "length of a system prompt",
    "user_tokens": "of a message of the user",
    "tool_tokens": "of a tool result",
    "answer_tokens": "of an answer; where the agent reasons, of the reasoning too",
    "context_tokens": "length at which an agent starts a new conversation",
    "scale": "factor of all these lengths",
    "skew": "how much more the first agents ask: weights 1/rank^skew",
    "vocabulary": "tokens in the vocabulary",
}


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> CacheReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    workload = Workload(**{option.name: getattr(arguments, option.name) for option in fields(Workload)})
    options = Options(
        workload=workload,
        models=arguments.model or tuple(KINDS),
        caches=arguments.caches,
        hidden=arguments.hidden,
        layers=arguments.layers,
        chunk_tokens=arguments.prefill_chunk,
        budget_bytes=arguments.cache_memory,
    )
    return measure(options, say)


def measure(options: Options, say: Callable[[str], None] = lambda _: None) -> CacheReport:
    """Serve the same workload to every model over every cache."""
    if device() == "cpu":
        mx.disable_compile()  # as the runner does
    size = Size(options.hidden, options.layers, options.workload.vocabulary)
    reports = []
    for kind in options.models:
        say(f"{kind} ...")
        subject = make_subject(kind, size, options.workload.seed)
        reports.append(_measure_model(subject, options))
        mx.clear_cache()
    return CacheReport(options.workload, options.chunk_tokens, options.budget_bytes, reports)


def _measure_model(subject: Subject, options: Options) -> ModelReport:
    layer_bytes = LayerBytes.of(subject)
    contenders = [
        Contender(
            subject,
            kind,
            chunk=options.chunk_tokens,
            vocabulary=options.workload.vocabulary,
            budget_bytes=options.budget_bytes,
        )
        for kind in options.caches
    ]
    exchanges, counts = serve_all(AgentTrace(options.workload), contenders)
    prompts = [len(exchange.ask.prompt) for exchange in exchanges]
    rows = []
    for index, contender in enumerate(contenders):
        served = [exchange.served[index] for exchange in exchanges]
        mismatches = sum(
            one.answer != exchange.served[0].answer for one, exchange in zip(served, exchanges, strict=True)
        )
        losses = Losses.of(prompts, [Reuse(one.matched, one.cached) for one in served])
        rows.append(Row(contender.kind, losses, Costs.of(served, layer_bytes, mismatches), served))
    for name, make in _PEERS.items():
        if name != BEST and not layer_bytes.per_state:
            continue  # its layers resume anywhere
        peer = make()
        reuses = [peer.serve(one.ask.prompt, _shown(one, options.chunk_tokens)) for one in exchanges]
        rows.append(Row(name, Losses.of(prompts, reuses)))
    return ModelReport(
        kind=subject.kind,
        meaning=KINDS[subject.kind],
        parameters=subject.parameters,
        layer_bytes=layer_bytes,
        operations=[exchange.ask.operation for exchange in exchanges],
        counts=dict(counts),
        rows=rows,
    )


class Server(Protocol):
    """A contender, or what stands for one."""

    def serve(self, ask: Ask) -> Served:
        """Compute the answer to one request."""
        ...


def serve_all(trace: AgentTrace, contenders: Sequence[Server]) -> tuple[list[Exchange], Counter[str]]:
    """Serve every request of a trace on every contender, in rotating order; also returns the counts of the trace."""
    exchanges = []
    while (ask := trace.next()) is not None:
        served: dict[int, Served] = {}
        for turn in range(len(contenders)):
            index = (ask.number + turn) % len(contenders)
            served[index] = contenders[index].serve(ask)
        trace.answer(None if ask.cancel is not None else served[0].answer)
        exchanges.append(Exchange(ask, [served[index] for index in range(len(contenders))]))
    return exchanges, trace.counts


def _shown(exchange: Exchange, chunk: int) -> Shown:
    """Returns a function that tells what layers would have seen of a request, served as by `Contender`."""
    prompt, cancel = exchange.ask.prompt, exchange.ask.cancel

    def shown(cached: int) -> Sequence[int]:
        if cancel is None:
            return [*prompt, *exchange.served[0].answer[:-1]]
        prefill = len(prompt) - cached - 1
        chunks = ceil(cancel * prefill / chunk)
        return prompt[: cached + min(prefill, chunks * chunk)]

    return shown
