"""`scripts/bench format`: what structured output costs, and what it saves.

Llamas of random weights, of 10 million parameters beside those of their vocabulary, whose tokens random merges made.

mask      of one token: on the host, to take the token and to find what may come next, in a JSON string, between JSON
          values, and in the free text of a thinking model; on the device, to apply it
answers   decode steps over HTTP with a grammar that forces nothing, against no grammar at all; and an answer that is
          mostly forced, its tokens appended as they come or drawn one by one
compile   schemas from small to large, none of which was asked for before, and the view of the vocabulary that the first
          of all has to wait for

Contenders take turns.
"""

import argparse
from collections.abc import Callable, Sequence
from random import Random

import mlx.core as mx

from runner.model.weights.dtype import device
from scripts.tools.bench.common.bare_loop import decode_bare
from scripts.tools.bench.common.options import numbers
from scripts.tools.bench.format.answers import Asked, measure_answers
from scripts.tools.bench.format.compiling import measure_compiling
from scripts.tools.bench.format.masks import measure_masks
from scripts.tools.bench.format.models import make_speaker, tokenizer_of
from scripts.tools.bench.format.report import AIMED_VOCABULARY, FormatReport
from scripts.tools.bench.llamas import M10, Size

SIZE = M10
ROWS = (1, 8)
_PROMPT_TOKENS, _STEPS = 16, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument(
        "--vocabularies",
        type=numbers,
        default=(4096, AIMED_VOCABULARY, 131072),
        metavar="N,...",
        help="4096,32768,131072",
    )
    parser.add_argument(
        "--answers",
        type=numbers,
        default=(AIMED_VOCABULARY,),
        metavar="N,...",
        help="those of answers (default: 32768)",
    )
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="of an answer (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> FormatReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    if min(arguments.turns, arguments.tokens) < 1:
        raise ValueError("there is at least one turn, and a token")
    if device() == "cpu":
        mx.disable_compile()  # as the runner does
    turns, seed = arguments.turns, arguments.seed
    step_us, masks, compiling = {}, [], []
    for vocabulary in arguments.vocabularies:
        say(f"vocabulary {vocabulary}: tokens ...")
        tokenizer = tokenizer_of(vocabulary, seed)
        say(f"vocabulary {vocabulary}: masks ...")
        step_us[vocabulary] = _step_us(vocabulary, SIZE, turns, seed)
        masks.append(measure_masks(tokenizer, turns, ROWS, seed))
        say(f"vocabulary {vocabulary}: compiling ...")
        compiling.append(measure_compiling(tokenizer, turns))
    answers = []
    for vocabulary in arguments.answers:
        say(f"vocabulary {vocabulary}: answers ...")
        asked = Asked(vocabulary, arguments.tokens, turns, seed, SIZE)
        answers.append(measure_answers(asked, arguments.blas, arguments.blas_threads))
    return FormatReport(turns, step_us, masks, compiling, answers)


def _step_us(vocabulary: int, size: Size, turns: int, seed: int) -> Sequence[float]:
    """Of the bare loop."""
    model, random = make_speaker(vocabulary, seed, size), Random(seed)
    prompt = [random.randrange(vocabulary - 1) for _ in range(_PROMPT_TOKENS)]
    return [1e6 / decode_bare(model, [prompt], _STEPS) for _ in range(turns)]
