"""The runner over HTTP, as the sessions of a trace use it, up to several at once.

A token of a trace is a word; the tokens of an answer are what the model said, in all later prompts. A session asks
again as soon as it has its answer: nobody thinks, and no tool runs.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from math import gcd
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, cast

from runner.cache.layer_interface import MakeLayers
from runner.cache.sketch import Forward, Sketch
from scripts.tools.bench.family_models import VOCABULARY, build, make
from scripts.tools.bench.llamas import END, words
from scripts.tools.bench.servers import Server
from scripts.tools.bench.traces.bounds import Kind
from scripts.tools.bench.traces.form import TURN, Request, Turns
from scripts.tools.host.lib import Client
from scripts.tools.host.lib import Request as Asked

from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache  # isort: skip

FAMILIES = {"kv": "llama", "w128": "gpt_oss", "w1024": "gemma3_text", "hyb": "qwen3_5"}
"""The architectures of the models that are made, by kind."""
_SMALL: Mapping[str, object] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "sliding_window": 64,
    "max_position_embeddings": 131_072,
}
"""Their configuration: windows are as much smaller than those of real models as the texts are."""
MADE_TURN = VOCABULARY - 1
"""The token around messages in models that are made."""
CHAT_ML = "<|im_end|>"
"""The text around messages, for models that are given."""
_COLD = 8  # the prompts that are asked again, each after words that no other prompt has
_HASH = 2_654_435_761


class Model(NamedTuple):
    """A model that the runner opens, and the text around its messages."""

    directory: Path
    turn: str


def made(kind: str, seed: int, directory: Path) -> Model:
    make(FAMILIES[kind], seed, directory, **_SMALL)
    return Model(directory, END)


def unit_of(kind: str) -> tuple[Kind, int]:
    """Returns the layers of the model that is made for a kind, in units, and the bytes of a unit: a power of 2, since
    the order of eviction rounds logarithms."""
    model, _ = build(FAMILIES[kind], **_SMALL)
    make_layers = cast("MakeLayers", lambda: [*make_prompt_cache(model)])
    sketch = Sketch(make_layers, cast("Forward", model), VOCABULARY)
    tails = [state for state in sketch.used.values() if not state.sliceable and not state.whole]
    windows = [state.layer.max_size for state in tails if isinstance(state.layer, RotatingKVCache)]
    window_token = sum(array.nbytes // array.shape[-2] for state in tails for array in state.arrays())
    token = sketch.facts.token_bytes
    state = sum(each.nbytes for each in sketch.used.values() if each.whole)
    common = gcd(token, window_token, 2 * state)
    unit = (common & -common) // 2
    return Kind(token // unit, window_token // unit, max(windows, default=0), state // unit), unit


class Answered(NamedTuple):
    """An answer: the seconds to its first line and between its lines, and the tokens that came from the cache."""

    turn: int
    """The number of the request in its session, from 1 on; 0 for a cold one."""
    first_s: float
    gaps_s: Sequence[float]
    cached: int
    prompt: str
    text: str


class Run(NamedTuple):
    """All answers in the order of the requests, the cold ones at last, and the runner's numbers before these."""

    answers: Sequence[Answered]
    requests: Sequence[Request]
    """The requests as the runner's tokens."""
    prompt_forwards: int
    steps: int
    held_bytes: int
    held_tokens: int

    def figures(self) -> dict[str, object]:
        answers = [
            {"turn": each.turn, "first_s": each.first_s, "gaps_s": each.gaps_s, "cached": each.cached}
            for each in self.answers
        ]
        return {**self._asdict(), "answers": answers, "requests": [len(each.prompt) for each in self.requests]}


class _Speaker:
    """Spells tokens of a trace."""

    def __init__(self, turn: str) -> None:
        self._words = words(VOCABULARY)
        self._said = {TURN: turn}

    def text(self, tokens: Iterable[int]) -> str:
        known, count = self._words, len(self._words)
        return "".join(self._said.get(token, known[token * _HASH % 2**32 % count]) for token in tokens)

    def note(self, tokens: Sequence[int], pieces: Sequence[str]) -> None:
        """From now on the tokens of an answer are what was said, and those that were not said are nothing."""
        self._said |= dict.fromkeys(tokens, "") | dict(zip(tokens, pieces, strict=False))


async def _ask(client: Client, prompt: str, tokens: int, turn: int) -> tuple[Answered, list[str]]:
    times, pieces, cached = [perf_counter()], list[str](), 0
    async with client.stream(Asked(prompt, {"num_predict": tokens, "temperature": 0.0})) as lines:
        async for line in lines:
            if line.content:
                times.append(perf_counter())
                pieces.append(line.content)
            if line.done:
                cached = line.prompt_eval_cached_count or 0
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Answered(turn, gaps[0] if gaps else 0.0, gaps[1:], cached, prompt, "".join(pieces)), pieces


async def replay(client: Client, requests: Sequence[Request], model: Model, parallel: int, cold: int = _COLD) -> Run:
    """Asks for all answers of a trace, `parallel` at once, then for a few of them cold."""
    speaker, turns = _Speaker(model.turn), Turns(requests)
    counts: dict[str, int] = {}
    found: dict[int, Answered] = {}

    async def serve(number: int) -> None:
        request = requests[number]
        counts[request.session] = counts.get(request.session, 0) + 1
        prompt, turn = speaker.text(request.prompt), counts[request.session]
        found[number], pieces = await _ask(client, prompt, len(request.answer), turn)
        speaker.note(request.answer, pieces)
        turns.end(number)

    running: set[asyncio.Task[None]] = set()
    while len(found) < len(requests):
        while len(running) < parallel and (number := turns.next()) is not None:
            running.add(asyncio.create_task(serve(number)))
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    answers = [found[number] for number in range(len(requests))]
    stats, picture = [json.loads((await client.send("GET", path)).body) for path in ("/v1/stats", "/v1/cache")]
    nonce = max(token for each in requests for token in (*each.prompt, *each.answer)) + 1
    colds = answers[:: max(1, len(answers) // cold)][:cold] if cold else []
    for number, each in enumerate(colds):
        prompt = speaker.text(range(nonce + 8 * number, nonce + 8 * number + 8)) + each.prompt
        answers.append((await _ask(client, prompt, 1, 0))[0])
    spoken = [
        each._replace(prompt=await client.tokenize(said.prompt), answer=await client.tokenize(said.text))
        for each, said in zip(requests, answers, strict=False)
    ]
    held = sum(node["end"] - node["start"] for node in picture["nodes"])
    slices, cache = stats["slices"], stats["cache"]
    return Run(answers, spoken, slices["prefill"], slices["decode"], cache["held_bytes"], held)


def serve(
    model: Model, requests: Sequence[Request], parallel: int, environment: Mapping[str, str], server: Server
) -> Run:
    """Starts the runner with a model, and replays a trace. Raises ValueError if it does not start."""
    with ExitStack() as stack, asyncio.Runner() as loop:
        started = server._replace(environment={**server.environment, **environment})
        process = started.start(model.directory, stack)

        async def replayed() -> Run:
            async with Client.of(process) as client:
                return await replay(client, requests, model, parallel)

        return loop.run(replayed())
