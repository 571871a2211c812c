"""`scripts/bench decode --drafts`: what drafts bring where text repeats, and what they cost where it does not.

fresh         nothing in the prompt has to do with the answer
quoted        the answer stands in the prompt
again         a prompt that was answered before
misleading    behind every six tokens of the answer the prompt goes on otherwise, so that every draft is wrong
eight         eight answers at once, which are not drafted
always right  a small draft model that is always right, where nothing repeats; always wrong: one that never is

The models say the words of their vocabulary in order, at the price of a Llama of their size. Tokens per second are
those of the client, with `--draft auto` over `--draft off`, or with a draft model over without, turn by turn.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from scripts.tools.bench.llamas import (
    END_TOKEN,
    FIRST_WORD,
    M1,
    VOCABULARY,
    Prompts,
    Size,
    config_of,
    spelled,
    write_words,
)
from scripts.tools.bench.report import Bars, Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import SIZES, Endpoint, MismeasuredError, answer, open_endpoint, this_runner

# isort: split
from mlx_lm.models import llama

WORDS = END_TOKEN - FIRST_WORD
PROMPT_TOKENS, ANSWER_TOKENS = 256, 128
_MATCH = 6
"""Tokens of a false promise that are the same as those of the answer."""


def write_chain(directory: Path, size: Size, seed: int, step: int = 1) -> None:
    """Attention and feed-forward networks are computed, and add nothing; the output's row of each word is the embedding
    of the one `step` words before it. So with another step every word is another one."""
    config = config_of(size) | {"tie_word_embeddings": False}
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    table = model.model.embed_tokens.weight
    words = table[FIRST_WORD:END_TOKEN]
    model.lm_head.weight = mx.zeros((VOCABULARY, size.hidden))
    model.lm_head.weight[FIRST_WORD:END_TOKEN] = mx.concatenate([words[-step:], words[:-step]])
    named = {"architectures": ["LlamaForCausalLM"], "eos_token_id": END_TOKEN}
    (directory / "config.json").write_text(json.dumps(named | config))
    write_words(directory)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})


class ChainPrompts:
    """Prompts whose answers are words in order. Each begins where the one before it ended, so that no answer of the
    same object is known."""

    def __init__(self, seed: int, start: int = 0) -> None:
        """The first answer begins with the word of this number."""
        self._other = Prompts(seed)
        self._next = start

    def fresh(self, tokens: int, answer: int) -> str:
        """Returns so many tokens; nothing in them has to do with the answer."""
        return self._other.text(tokens - 1) + self._words(self._skip(answer), 1)

    def quoted(self, tokens: int, answer: int) -> str:
        """Returns so many tokens that contain the answer."""
        first = self._skip(answer)
        whole = self._words(first, answer + 1)
        return whole + self._other.text(tokens - answer - 2) + self._words(first, 1)

    def misleading(self, answer: int) -> str:
        """Returns a prompt that goes on otherwise behind every few words of the answer, all of which it contains."""
        first = self._skip(answer)
        parts = [self._words(first + place - _MATCH, _MATCH) + self._other.text(1) for place in range(answer + 1)]
        return "".join(parts) + self._words(first, 1)

    def _skip(self, answer: int) -> int:
        first, self._next = self._next, self._next + answer + 1
        return first

    @staticmethod
    def _words(first: int, count: int) -> str:
        return spelled(FIRST_WORD + (first + place) % WORDS for place in range(count))


AUTO, OFF, RIGHT, WRONG = "auto", "off", "always right", "always wrong"
"""Values of `--draft`, and draft models in their place."""
CASES: Mapping[str, tuple[str, float, str]] = {
    "fresh": (AUTO, 0.97, "nothing repeats"),
    "quoted": (AUTO, 2.5, "the answer stands in the prompt"),
    "again": (AUTO, 2.5, "the prompt was answered before"),
    "misleading": (AUTO, 0.97, "every draft is wrong"),
    "eight": (AUTO, 0.98, "eight at once"),
    RIGHT: (RIGHT, 1.2, "a draft model that is right"),
    WRONG: (WRONG, 0.97, "a draft model that is wrong"),
}
"""Who is held against `--draft off`, the least ratio, and the meaning."""
STREAMS, SHORT_TOKENS = 8, 16


class Drafted(NamedTuple):
    """One answer, or several: tokens per second, and the texts."""

    tokens_per_s: float
    texts: Sequence[str]


Speeds = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By case: tokens per second with drafts, and without, turn by turn."""


def report(turns: int, models: Mapping[str, Speeds]) -> Report:
    """Returns the results, by size: never slower, and much faster where all repeats."""
    found = [(size, case, *pair) for size, by_case in models.items() for case, pair in by_case.items()]
    rows = [
        (f"{size}, {case}", f"{median(drafted):.1f}", f"{median(plain):.1f}", f"{median_ratio(drafted, plain):.2f}")
        for size, case, drafted, plain in found
    ]
    ratios = {size: [median_ratio(*pair) for pair in by_case.values()] for size, by_case in models.items()}
    return Report(
        [
            Target(f"{size}, {case}: {CASES[case][2]}", median_ratio(drafted, plain), CASES[case][1], most=False)
            for size, case, drafted, plain in found
        ],
        [Table(f"tokens/s: medians of {turns} turns", ("", "drafts", "--draft off", "ratio"), rows)],
        [Bars("tokens/s with drafts over those without", [*CASES], ratios, digits=2, target=1.0)],
        {"turns": turns, "models": models},
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measures all sizes. ValueError when there are not enough words for so many turns."""
    if arguments.turns >= WORDS // 2 // (ANSWER_TOKENS + 1):
        raise ValueError("there are not more turns than there are words for")
    models = {}
    for size in arguments.size or ("10M", "60M"):
        say(f"{size}, drafts ...")
        models[size] = _measure(SIZES[size], arguments)
    return report(arguments.turns, models)


def _measure(size: Size, arguments: argparse.Namespace) -> Speeds:
    """Raises MismeasuredError if an answer with drafts is another than without."""
    with asyncio.Runner() as loop, ExitStack() as stack:
        model, *drafts = (Path(stack.enter_context(TemporaryDirectory(prefix="bench-"))) for _ in range(3))
        write_chain(model, size, arguments.seed)
        for step, draft in enumerate(drafts, start=1):
            write_chain(draft, M1, arguments.seed, step)
        endpoints = {}
        for name, wish in {AUTO: AUTO, OFF: OFF, RIGHT: str(drafts[0]), WRONG: str(drafts[1])}.items():
            server = this_runner(name, STREAMS, blas=arguments.blas, blas_threads=arguments.blas_threads)
            server.environment["MLX_RUNNER_DRAFT"] = wish
            endpoints[name] = open_endpoint(server, server.start(model, stack), model, stack, loop)
        found: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for case, (drafter, _, _) in CASES.items():
            # Both contenders get the same prompts. Nobody has heard the answers that are to be new.
            start = {"misleading": WORDS // 2, RIGHT: WORDS // 4, WRONG: WORDS // 4}.get(case, 0)
            turns: dict[str, Callable[[], Drafted]] = {}
            for name in (drafter, OFF):
                prompts = ChainPrompts(arguments.seed, start)
                turns[name] = partial(_ask, loop, endpoints[name], case, prompts)
            drafted, plain = interleave(turns, arguments.turns).values()
            if any(one.texts != other.texts for one, other in zip(drafted, plain, strict=True)):
                raise MismeasuredError(f"{case}: another answer with drafts than without")
            found[case] = [each.tokens_per_s for each in drafted], [each.tokens_per_s for each in plain]
        return found


def _ask(loop: asyncio.Runner, endpoint: Endpoint, case: str, prompts: ChainPrompts) -> Drafted:
    return loop.run(measure(endpoint, case, prompts))


async def measure(endpoint: Endpoint, case: str, prompts: ChainPrompts) -> Drafted:
    """Measures one answer after its first token, or eight from the question to their last."""
    if case == "eight":
        asked, started = [prompts.quoted(SHORT_TOKENS, 8) for _ in range(STREAMS)], perf_counter()
        answers = await asyncio.gather(*(answer(endpoint, prompt, ANSWER_TOKENS) for prompt in asked))
        speed = STREAMS * ANSWER_TOKENS / (perf_counter() - started)
        return Drafted(speed, [each.text for each in answers])
    if case == "misleading":
        prompt = prompts.misleading(ANSWER_TOKENS)
    else:
        prompt = (prompts.quoted if case == "quoted" else prompts.fresh)(PROMPT_TOKENS, ANSWER_TOKENS)
    if case == "again":
        await answer(endpoint, prompt, ANSWER_TOKENS)
    answered = await answer(endpoint, prompt, ANSWER_TOKENS)
    return Drafted(answered.tokens_per_s, [answered.text])
