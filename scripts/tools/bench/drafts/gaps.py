"""The times between the tokens of an answer while another is written that could be drafted."""

import argparse
import asyncio
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.tools.bench.common.contenders import SIZES, open_endpoint
from scripts.tools.bench.common.gaps import Gaps
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.requests import MismeasuredError, answer, ask
from scripts.tools.bench.common.servers import Endpoint, Server
from scripts.tools.bench.drafts.chain import ANSWER_TOKENS, PROMPT_TOKENS, ChainPrompts, write_chain

_WATCHED_TOKENS = 2 * ANSWER_TOKENS


def measure_gaps(size: str, arguments: argparse.Namespace, drafting: Server, plain: Server) -> Gaps:
    """Starts both runners, and watches answers in which nothing repeats, beside others that repeat their prompts."""
    with asyncio.Runner() as loop, ExitStack() as stack:
        model = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_chain(model, SIZES[size], arguments.seed)
        watched = {}
        for server in (drafting, plain):
            endpoint = open_endpoint(server, server.start(model, stack), model, stack, loop)
            watched[server.name] = partial(_watch, loop, endpoint, ChainPrompts(arguments.seed))
        found = interleave(watched, arguments.turns)
    return Gaps(found[drafting.name], found[plain.name])


def _watch(loop: asyncio.Runner, endpoint: Endpoint, prompts: ChainPrompts) -> list[float]:
    async def both() -> list[float]:
        watched, (began, *_, ended) = await asyncio.gather(
            answer(endpoint, prompts.fresh(PROMPT_TOKENS, _WATCHED_TOKENS), _WATCHED_TOKENS),
            ask(endpoint, prompts.quoted(PROMPT_TOKENS, ANSWER_TOKENS), ANSWER_TOKENS),
        )
        if watched.times[-1] < ended:
            raise MismeasuredError("the answer ended before the one beside it")
        beside = [time for time in watched.times if began <= time <= ended]
        return [1e3 * (after - before) for before, after in pairwise(beside)]

    return loop.run(both())
