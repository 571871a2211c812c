"""`scripts/bench drafts`: what drafts bring to one answer, and to several that are computed together.

The model is SmolLM2-135M-Instruct in 4 bits, which `scripts/real-model` makes (93 MB are fetched once), or a random one
whose greedy answers repeat themselves (--size). `ours` runs at its default settings, `no drafts` with --draft off; they
take turns, after one round that does not count.

repeat   each user's prompt has a passage three times, and the answer goes on with it
fresh    each user's answer is a story of its own
agents   all users have one file in their prompts, and are to write it with another change
gap      the longest time between two lines of answers that repeat, in milliseconds, while somebody else's prompt of 300
         tokens is read, which comes once each has 16 texts

Other figures are tokens per second of all answers, by the number of users, from the first text of any to the last one,
and in a row of their own to the end of the first answer, while all users are there. The users' prompts have been read
before.
"""

import argparse
import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random
from time import perf_counter

from tokenizers import Tokenizer

from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.parallel import largest_gap
from scripts.tools.bench.real import Conversations, Figures, Heard
from scripts.tools.bench.report import Report, Rounds, Table, Target, median_ratio
from scripts.tools.bench.servers import OURS, SIZES, Endpoint, random_model, serve, this_runner
from scripts.tools.real.chat import render
from scripts.tools.real.main import FetchError, make_model

PLAIN = "no drafts"
BOUNDS = {
    "repeat 1": 1.8,
    "repeat 2": 2.0,
    "repeat 4": 1.7,
    "repeat 8": 1.4,
    "fresh 1": 0.98,
    "fresh 4": 0.98,
    "fresh 8": 0.98,
    "agents 4": 1.2,
    "gap 2": 1.05,
    "gap 4": 1.05,
    "gap 8": 1.05,
}
"""With drafts over without: tokens per second, at least, and gaps, at most."""
TWO_OVER_ONE = 1.2
"""The tokens per second of two repeating answers over those of one, at least."""
ANSWER_TOKENS, _LONG_TOKENS = 128, 256
_GAP, _ALL_THERE = "gap", ", while all are there"
_PASSAGE_TOKENS = 40
_NEWCOMER_TOKENS, _TEXTS_BEFORE = 300, 16  # of a prompt, and texts of each answer before it comes
_POLL_S = 0.005
_PARALLEL = 9
_FILE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))
"""


class Users:
    """Prompts of each case, new ones in each round; the rounds of all contenders have the same."""

    def __init__(self, seed: int, text: Callable[[int], str], story: Callable[[], str]) -> None:
        """`text` makes a passage of a number of tokens, `story` a prompt."""
        self._random = Random(seed)
        self._text = text
        self._fresh = story

    def prompts(self, case: str) -> list[str]:
        kind, users = case.split()
        return [getattr(self, f"_{kind}")() for _ in range(int(users))]

    def _repeat(self) -> str:
        passage = self._text(_PASSAGE_TOKENS)
        return f"{passage}\n" * 3 + passage[:20]

    _gap = _repeat

    def _agents(self) -> str:
        name = self._random.choice(("client", "holder", "person", "member"))
        return render([("user", f"Here is a file:\n```python\n{_FILE}```\nWrite it again with {name} for owner.")])


async def measure(endpoint: Endpoint, conversations: Conversations, prompts: Sequence[str], newcomer: str) -> Figures:
    """Asks all at once, once their prompts are known. Returns the longest gap in milliseconds while the `newcomer`, a
    prompt, is read; without one the tokens per second of all, until the last answer ends and while all are there."""
    for prompt in prompts:
        await conversations.hear(endpoint, prompt, 1)
    newcomers: list[Heard] = []
    tokens = _LONG_TOKENS if newcomer else ANSWER_TOKENS
    texts: list[list[str]] = [[] for _ in prompts]
    async with asyncio.TaskGroup() as group:
        asked = zip(prompts, texts, strict=True)
        tasks = [group.create_task(conversations.hear(endpoint, prompt, tokens, each)) for prompt, each in asked]
        if newcomer:
            for task, each in zip(tasks, texts, strict=True):
                while len(each) < _TEXTS_BEFORE and not task.done():
                    await asyncio.sleep(_POLL_S)
            began = perf_counter()
            newcomers.append(await conversations.hear(endpoint, newcomer, 2))
    answers = [task.result() for task in tasks]
    if newcomers:
        held_up = [each for each in answers if each.ended > began] or answers  # those that it could hold up
        return {"": 1e3 * max(largest_gap(each.times, began, newcomers[0].ended) for each in held_up)}
    began, end = min(each.began for each in answers), min(each.ended for each in answers)
    there = [bisect_right(each.times, end) / len(each.times) for each in answers]  # of the texts, and about the tokens
    early_tokens = sum(each.later_tokens * share for each, share in zip(answers, there, strict=True))
    seconds = max(each.ended for each in answers) - began
    return {"": sum(each.later_tokens for each in answers) / seconds, _ALL_THERE: early_tokens / (end - began)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case", action="append", choices=BOUNDS, metavar="CASE", help=f"one of {', '.join(BOUNDS)}; default: all"
    )
    parser.add_argument(
        "--size", choices=SIZES, help="a random Llama in place of the trained model, for the cases repeat and gap only"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark. Raises ValueError if the model cannot be fetched."""
    cases: Sequence[str] = arguments.case or [*BOUNDS]
    if arguments.size:
        cases = [case for case in cases if case.startswith(("repeat", _GAP))]
        if not cases:
            raise ValueError("a random model has only the cases repeat and gap: leave out --size, or name one of them")
    contenders = [this_runner(OURS, _PARALLEL, "auto"), this_runner(PLAIN, _PARALLEL)]
    found: dict[str, list[Figures]] = {OURS: [], PLAIN: []}
    with asyncio.Runner() as loop, ExitStack() as stack:
        try:
            model = random_model(SIZES[arguments.size], arguments.seed, stack) if arguments.size else make_model()
        except FetchError as error:
            raise ValueError(str(error)) from error
        endpoints = serve(model, contenders, stack, loop)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        conversations = Conversations(arguments.seed, lambda text: len(tokenizer.encode(text).ids))
        text = Prompts(arguments.seed).text if arguments.size else conversations.text
        users = Users(arguments.seed, text, conversations.story)

        for number in range(-1, arguments.turns):
            figures: dict[str, dict[str, float]] = {name: {} for name in found}
            for case in cases:  # both right after each other: a machine may be twice as fast a minute later
                prompts = users.prompts(case)
                newcomer = text(_NEWCOMER_TOKENS) if case.startswith(_GAP) else ""
                for name in [*found][:: 1 if number % 2 else -1]:
                    measured = loop.run(measure(endpoints[name], conversations, prompts, newcomer))
                    figures[name] |= {case + what: figure for what, figure in measured.items()}
                say(f"{case}: {figures[OURS][case]:.0f} over {figures[PLAIN][case]:.0f}")
            if number >= 0:
                for name, rounds in found.items():
                    rounds.append(figures[name])
    return report(arguments.turns, cases, Rounds(found))


def report(turns: int, cases: Sequence[str], rounds: Rounds) -> Report:
    """Returns the results of the cases that were measured."""
    targets = [
        Target(case, rounds.ratio(OURS, PLAIN, case), BOUNDS[case], most=case.startswith(_GAP)) for case in cases
    ]
    if "repeat 1" in cases and "repeat 2" in cases:
        two = median_ratio(rounds.of(OURS, "repeat 2"), rounds.of(OURS, "repeat 1"))
        targets.append(Target("two that repeat over one", two, TWO_OVER_ONE, most=False))
    alone = tuple(case for case in cases if case.endswith(" 1") or case.startswith(_GAP))
    figures = [case + what for case in cases for what in (("",) if case in alone else ("", _ALL_THERE))]
    cells = rounds.rows(figures, ",.0f")
    rows = [
        (figure, *(cells[name][place] for name in (OURS, PLAIN)), f"{rounds.ratio(OURS, PLAIN, figure):.2f}")
        for place, figure in enumerate(figures)
    ]
    table = Table(
        f"tokens per second of all, and gaps in ms: medians of {turns} rounds", ("", OURS, PLAIN, "ratio"), rows
    )
    return Report(targets, [table], {"turns": turns, "rounds": rounds.found})
