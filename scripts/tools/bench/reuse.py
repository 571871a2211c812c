"""`scripts/bench ttft --disk` and `--picture`: first tokens of conversations that were killed, or show photos.

--disk: a conversation whose process was killed.

cold     a prompt of 2,000 tokens that nobody has seen
memory   its answer and 32 tokens more, while another conversation has the layers: from the cache in memory
disk     another 32 tokens after the same answer, in a process that was started after a SIGKILL

--picture: a photo of 640 x 480 in a prompt, against text of the same length, with a Qwen 3.5 of random weights.

cold     a photo that nobody has seen
again    the same prompt once more
append   its answer and 32 tokens more

and the tokens per second of an answer to text, with the tower loaded and with --no-media.
"""

import argparse
import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import mlx.core as mx
import msgspec
from PIL import Image

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from protocol.stats import Stats
from runner.media.families.qwen3_5 import Qwen35
from runner.model.towers.qwen3_5 import Qwen35Tower
from scripts.tools import ROOT
from scripts.tools.bench.llamas import (
    CONTEXT_TOKENS,
    END_TOKEN,
    M10,
    VOCABULARY,
    Prompts,
    make_model,
    silence,
    write_model,
    write_words,
)
from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    FEW_TOKENS,
    OURS,
    SHORT_TOKENS,
    SIZES,
    RunnerEndpoint,
    Server,
    answer,
    open_endpoint,
    this_runner,
)
from scripts.tools.demo.plain import named_weights
from scripts.tools.host.lib import Medium

# isort: split
from mlx_lm.models import qwen3_5

COLD_TOKENS, OTHER_TOKENS, ANSWER_TOKENS, APPENDED_TOKENS, STREAM_TOKENS = 2000, 300, 16, 32, 256
MEMORY_RATIO, COPY_SHARE, COLD_RATIOS = 1.5, 0.01, {"10M": 20.0, "60M": 12.0}
TURN_RATIO, TEXT_RATIO = 1.10, 0.98
PICTURE, TEXT, SEES, BLIND = "picture", "text", "with the tower", "--no-media"
SEEING = ROOT / "scripts" / "demo_seeing_model"
PHOTO = (640, 480)
_POLL_S = 0.05


class Asked(NamedTuple):
    """One turn: milliseconds to the first token of each case, and the prompt's tokens that each computed."""

    ms: Mapping[str, float]
    computed: Mapping[str, int]


def _report(
    title: str,
    asked: Mapping[str, Sequence[Asked]],
    targets: Sequence[Target],
    rates: Mapping[str, Sequence[float]] = {},
) -> Report:
    """`asked` is by kind of prompt, `rates` are tokens per second of text."""
    rounds = Rounds({kind: [turn.ms for turn in turns] for kind, turns in asked.items()})
    cases = [*next(iter(asked.values()))[0].ms]
    rows = [
        (kind, *cells, " ".join(str(asked[kind][-1].computed[case]) for case in cases))
        for kind, cells in rounds.rows(cases).items()
    ]
    speeds = [(name, f"{median(speeds):.1f}") for name, speeds in rates.items()]
    figures = {kind: [turn._asdict() for turn in turns] for kind, turns in asked.items()}
    return Report(
        targets,
        [
            Table(f"time to the first token, ms, medians: {title}", ("", *cases, "prompt tokens computed"), rows),
            Table("text", ("", "tokens/s"), speeds),
        ],
        [rounds.bars("time to the first token, ms", cases, 1)],
        {"title": title, "turns": figures, "text_tokens_per_s": rates},
    )


def _ratio(turns: Sequence[Asked], others: Sequence[Asked], case: str, other: str) -> float:
    return median_ratio([turn.ms[case] for turn in turns], [turn.ms[other] for turn in others])


class _Conversation:
    """Asks one question after the other, and notes what each took."""

    def __init__(self, loop: asyncio.Runner, prompts: Prompts) -> None:
        self.ms, self.computed = dict[str, float](), dict[str, int]()
        self._loop, self._prompts = loop, prompts

    def ask(self, endpoint: RunnerEndpoint, case: str, prompt: str, tokens: int = FEW_TOKENS) -> str:
        answered = self._loop.run(answer(endpoint, prompt, tokens))
        self.ms[case] = 1e3 * answered.first_s
        self.computed[case] = endpoint.prompt_tokens - (endpoint.cached or 0)
        return prompt + answered.text

    def append(self, endpoint: RunnerEndpoint, case: str, talk: str) -> None:
        self.ask(endpoint, case, talk + self._prompts.text(APPENDED_TOKENS))

    @property
    def asked(self) -> Asked:
        return Asked(self.ms, self.computed)


def run_disk(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measures each turn with a new conversation in a new directory."""
    prompts, size = Prompts(arguments.seed), SIZES[arguments.size]
    asked, shares = list[Asked](), list[float]()
    with asyncio.Runner() as loop, TemporaryDirectory(prefix="bench-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(model, make_model(size, arguments.seed), size)
        for turn in range(arguments.turns):
            say(f"turn {turn + 1} ...")
            server = this_runner(OURS, 1, blas=arguments.blas, blas_threads=arguments.blas_threads)
            server.environment["MLX_RUNNER_DISK_CACHE"] = str(Path(folder) / f"kept-{turn}")
            one, stats = _killed(server, model, loop, prompts)
            asked.append(one)
            shares.append(stats.disk.copy_s / stats.slices.prefill_s)
    targets = [
        Target("first token, disk over memory", _ratio(asked, asked, "disk", "memory"), MEMORY_RATIO),
        Target("tokens computed after a restart", max(one.computed["disk"] for one in asked), APPENDED_TOKENS + 1),
        Target("engine time to write over prefill", median(shares), COPY_SHARE),
    ]
    if bound := COLD_RATIOS.get(arguments.size):
        targets.append(Target("first token, cold over disk", _ratio(asked, asked, "cold", "disk"), bound, most=False))
    return _report(f"{COLD_TOKENS} tokens, {arguments.size} parameters", {OURS: asked}, targets)


def _killed(server: Server, model: Path, loop: asyncio.Runner, prompts: Prompts) -> tuple[Asked, Stats]:
    """Returns the times, and the numbers of the process when all was written."""
    noted = _Conversation(loop, prompts)
    with ExitStack() as stack:
        endpoint, kill = _start(server, model, loop, stack)
        loop.run(answer(endpoint, prompts.text(OTHER_TOKENS), FEW_TOKENS))
        talk = noted.ask(endpoint, "cold", prompts.text(COLD_TOKENS), ANSWER_TOKENS)
        loop.run(answer(endpoint, prompts.text(OTHER_TOKENS), FEW_TOKENS))
        noted.append(endpoint, "memory", talk)
        while (stats := loop.run(_stats(endpoint))).disk.pending_tokens or not stats.disk.segments:
            loop.run(asyncio.sleep(_POLL_S))
        kill()
        endpoint, _ = _start(server, model, loop, stack)
        loop.run(answer(endpoint, prompts.text(OTHER_TOKENS), FEW_TOKENS))
        noted.append(endpoint, "disk", talk)
    return noted.asked, stats


def run_pictures(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measures photos beside text, turn by turn."""
    prompts, random = Prompts(arguments.seed), Random(arguments.seed)
    with asyncio.Runner() as loop, ExitStack() as stack:
        model = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_seeing_model(model, arguments.seed)
        endpoints = dict[str, RunnerEndpoint]()
        for name, off in ((SEES, "0"), (BLIND, "1")):
            server = this_runner(name, 8, blas=arguments.blas, blas_threads=arguments.blas_threads)
            server.environment["MLX_RUNNER_NO_MEDIA"] = off
            endpoints[name], _ = _start(server, model, loop, stack)
        soft = Qwen35().geometry(*PHOTO).tokens + 2  # and a token before and after them

        def converse(endpoint: RunnerEndpoint, prompt: str) -> Asked:
            noted = _Conversation(loop, prompts)
            talk = noted.ask(endpoint, "cold", prompt, ANSWER_TOKENS)
            noted.ask(endpoint, "again", prompt)
            noted.append(endpoint, "append", talk)
            return noted.asked

        def about_photo() -> Asked:
            shown = RunnerEndpoint(endpoints[SEES].client, Medium(photo(random)))
            return converse(shown, f"{prompts.text(SHORT_TOKENS)}[img-0]{prompts.text(SHORT_TOKENS)}")

        def about_text() -> Asked:
            return converse(endpoints[SEES], prompts.text(2 * SHORT_TOKENS + soft))

        def rate(name: str) -> float:
            return loop.run(answer(endpoints[name], prompts.text(SHORT_TOKENS), STREAM_TOKENS)).tokens_per_s

        say("first tokens ...")
        asked = interleave({PICTURE: about_photo, TEXT: about_text}, arguments.turns)
        say("text ...")
        rates = interleave({name: partial(rate, name) for name in endpoints}, arguments.turns)
    ratios = {case: _ratio(asked[PICTURE], asked[TEXT], case, case) for case in ("again", "append")}
    targets = [Target(f"{case}, a picture over text", ratio, TURN_RATIO) for case, ratio in ratios.items()]
    speed = median_ratio(rates[SEES], rates[BLIND])
    targets.append(Target("text, tokens/s with the tower over those without", speed, TEXT_RATIO, most=False))
    return _report("a photo of {} x {} beside text".format(*PHOTO), asked, targets, rates)


def photo(random: Random) -> bytes:
    """Returns a JPEG that nobody has seen, as large as those of a camera: smooth shapes under a little noise."""
    colours = bytes(random.randrange(256) for _ in range(8 * 6 * 3))
    smooth = Image.frombytes("RGB", (8, 6), colours).resize(PHOTO, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    Image.blend(smooth, Image.effect_noise(PHOTO, 20).convert("RGB"), 0.2).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_seeing_model(directory: Path, seed: int) -> None:
    """Writes a Qwen 3.5 of random weights: 10 M parameters, and the tower of scripts/demo_seeing_model."""
    config = json.loads((SEEING / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= {"hidden_size": M10.hidden, "intermediate_size": 3 * M10.hidden, "num_hidden_layers": M10.layers}
    text |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * CONTEXT_TOKENS, "eos_token_id": END_TOKEN}
    vision |= {"out_hidden_size": M10.hidden, "num_position_embeddings": 48**2}
    config |= {"eos_token_id": END_TOKEN, "vision_start_token_id": VOCABULARY - 4}
    config |= {"image_token_id": VOCABULARY - 3, "vision_end_token_id": VOCABULARY - 2}
    mx.random.seed(seed)
    model, tower = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config)), Qwen35Tower.from_config(config)
    silence(model.language_model.model.embed_tokens)
    weights = named_weights(model) | {f"vision_tower.{name}": each for name, each in named_weights(tower).items()}
    (directory / "config.json").write_text(json.dumps(config))
    write_words(directory)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})


async def _stats(endpoint: RunnerEndpoint) -> Stats:
    return msgspec.json.decode((await endpoint.client.send("GET", "/v1/stats")).body, type=Stats)


def _start(
    server: Server, model: Path, loop: asyncio.Runner, stack: ExitStack
) -> tuple[RunnerEndpoint, Callable[[], None]]:
    process = server.start(model, stack)
    endpoint = open_endpoint(server, process, model, stack, loop)
    assert isinstance(endpoint, RunnerEndpoint)
    return endpoint, process.kill
