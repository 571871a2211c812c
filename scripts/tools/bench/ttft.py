"""`scripts/bench ttft`: the time to the first token, at the client, against a loop that computes only what it must.

cold     a prompt of 2,000 tokens that nobody has seen
again    the same prompt once more
append   its answer of 16 tokens and 32 more behind it
switch   two conversations over one prefix of 1,500 tokens take turns; each turn is the answer to the one before, and 32
         tokens more: the median of four turns

`bare loop` has the model and mlx-lm's caches, which have seen exactly what an earlier turn left, and computes the rest
in chunks as long as the runner's.
"""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import NamedTuple

from runner.device import device
from runner.settings import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS
from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave
from scripts.tools.bench.servers import (
    BARE,
    FEW_TOKENS,
    OURS,
    PEERS,
    SIZES,
    Endpoint,
    answer,
    random_model,
    serve,
    servers,
)

COLD_TOKENS, PREFIX_TOKENS, OWN_TOKENS = 2000, 1500, 200
ANSWER_TOKENS, APPENDED_TOKENS = 16, 32
COLD_RATIO, REUSE_RATIO, REUSE_MS = 1.03, 1.5, 5.0
_SWITCHES = 4


class Times(NamedTuple):
    """Of one turn: milliseconds of each case, and the tokens of each prompt that were not cached, where told."""

    ms: Mapping[str, float]
    computed: Sequence[int | None] = ()


CASES = ("cold", "again", "append", "switch")


def report(size: str, turns: int, found: Mapping[str, Sequence[Times]]) -> Report:
    rounds = Rounds({name: [times.ms for times in each] for name, each in found.items()})
    targets = [Target("cold, ours over the bare loop", rounds.ratio(OURS, BARE, "cold"), COLD_RATIO)]
    for case in CASES[1:]:
        bound = REUSE_RATIO * rounds.median(BARE, case) + REUSE_MS
        targets.append(Target(f"{case}, ours", rounds.median(OURS, case), bound, unit=" ms"))
    for peer in filter(found.__contains__, PEERS):
        targets += [Target(f"{case}, ours over {peer}", rounds.ratio(OURS, peer, case), 1.0) for case in CASES]
    computed = {name: ["-" if count is None else str(count) for count in found[name][-1].computed] for name in found}
    rows = [(name, *cells, " ".join(computed[name])) for name, cells in rounds.rows(CASES).items()]
    title = f"time to the first token, ms: medians of {turns} turns; {size} parameters"
    figures = {name: [times._asdict() for times in each] for name, each in found.items()}
    return Report(
        targets,
        [Table(title, ("", *CASES, "prompt tokens computed"), rows)],
        {"size": size, "turns": turns, "ms": figures},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=SIZES, default="10M", help="of the model, in parameters (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    size, prompts = SIZES[arguments.size], Prompts(arguments.seed)
    with asyncio.Runner() as loop, ExitStack() as stack:
        bare = BareLoop(size, arguments.seed, stack)
        servers_up = serve(random_model(size, arguments.seed, stack), servers(arguments, say), stack, loop)

        def served(endpoint: Endpoint) -> Times:
            return loop.run(served_times(endpoint, prompts))

        contenders: dict[str, Callable[[], Times]] = {
            **{name: partial(served, one) for name, one in servers_up.items()},
            BARE: partial(bare_times, bare, prompts),
        }
        found = interleave(contenders, arguments.turns)
    return report(arguments.size, arguments.turns, found)


async def served_times(endpoint: Endpoint, prompts: Prompts) -> Times:
    computed: list[int | None] = []

    async def first_ms(prompt: str, tokens: int, answer_tokens: int) -> tuple[float, str]:
        answered = await answer(endpoint, prompt, answer_tokens)
        computed.append(None if endpoint.cached is None else tokens - endpoint.cached)
        return 1e3 * answered.first_s, prompt + answered.text

    prompt = prompts.text(COLD_TOKENS)
    cold, longer = await first_ms(prompt, COLD_TOKENS, ANSWER_TOKENS)
    again, _ = await first_ms(prompt, COLD_TOKENS, FEW_TOKENS)
    length = COLD_TOKENS + ANSWER_TOKENS + APPENDED_TOKENS
    append, _ = await first_ms(longer + prompts.text(APPENDED_TOKENS), length, FEW_TOKENS)

    prefix, length = prompts.text(PREFIX_TOKENS), PREFIX_TOKENS + OWN_TOKENS
    texts = []
    for _ in range(2):
        own = prefix + prompts.text(OWN_TOKENS)
        texts.append(own + (await answer(endpoint, own, ANSWER_TOKENS)).text)
    switches = []
    for turn in range(_SWITCHES):
        if turn % 2 == 0:
            length += ANSWER_TOKENS + APPENDED_TOKENS
        took, texts[turn % 2] = await first_ms(texts[turn % 2] + prompts.text(APPENDED_TOKENS), length, ANSWER_TOKENS)
        switches.append(took)
    return Times({"cold": cold, "again": again, "append": append, "switch": median(switches)}, computed)


def bare_times(bare: BareLoop, prompts: Prompts) -> Times:
    """Does the same work without the tokens in the cache: the last token of an answer was drawn, but not seen."""
    chunk = CPU_CHUNK_TOKENS if device() == "cpu" else GPU_CHUNK_TOKENS

    def first_ms(known: int, tokens: int) -> float:
        return 1e3 * bare.first_token_s(prompts.ids(known), prompts.ids(tokens), chunk)

    return Times(
        {
            "cold": first_ms(0, COLD_TOKENS),
            "again": first_ms(COLD_TOKENS - 1, 1),
            "append": first_ms(COLD_TOKENS + ANSWER_TOKENS - 1, 1 + APPENDED_TOKENS),
            "switch": first_ms(PREFIX_TOKENS + OWN_TOKENS + ANSWER_TOKENS - 1, 1 + APPENDED_TOKENS),
        }
    )
