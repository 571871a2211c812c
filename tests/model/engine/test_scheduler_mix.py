"""Random mixes of requests: each gets the answer that it gets alone.

A mix is up to eight requests that share prefixes or do not, with options of every sort, that come and go at any slice;
the slices are chosen at random, or by the real policy on a made-up clock. The number in the name of a test is
the seed of its mix.
"""

import itertools
import random
from dataclasses import dataclass

import pytest

from runner.engine.policy import SlicePolicy
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB
from tests.lib.tiny_engine import (
    SLICEABLE,
    ClientRequest,
    RandomPolicy,
    RequestSpec,
    TinyEngine,
    at_call,
    oracle_answer,
    text_of,
)
from tests.lib.told_drafts import told

PHASES = ("queued", "awaiting prefix", "prefilling", "alone", "batch")
EOS = frozenset({5, 23})
GRAMMARS = (
    'start: "<<=" /[0-9]{1,6}/ ("=>" /[0-9]{2,4}/)* ">>"',  # forced at the beginning, in the middle, at the end
    'start: ("-" | "+" /[0-9]/)+',  # may end after every sign
    'start: "********************" /[ -?]{0,30}/',
    "start: /[!-)]{12}/",  # an end that is forced by a count
)

OTHERS = ("bailing_hybrid", "jamba", "kimi_linear", "mamba", "recurrent_gemma", "rwkv7")
"""Architectures with the recurrences that no kind has, and with latent attention beside them."""


@dataclass
class Part:
    """A request of a mix, with the slices at which it comes and leaves."""

    spec: RequestSpec
    wait: int  # slices since the one before came
    leaves: str  # the phase in which it is cancelled, or nothing
    patience: int  # how many slices it stays in that phase

    def leave(self, engine: TinyEngine, asked: ClientRequest) -> None:
        """Cancels the request when it is time."""
        if asked.request.cancelled or engine.phase(asked) != self.leaves:
            return
        self.patience -= 1
        if self.patience <= 0:
            asked.request.cancel()


class Mix:
    """A mix, made from one seed. `more` is what the engine does besides: "drafts", which are told and right by chance;
    then memory runs out now and then."""

    def __init__(self, name: str, seed: int, more: str = "") -> None:
        self.more = more
        numbers = self._numbers = random.Random(f"{name} {seed}")
        self._name = name
        self._bases = [[numbers.randrange(VOCAB) for _ in range(80)] for _ in range(2)]
        self._prompts: list[list[int]] = []
        count = numbers.choice((1, 2, 3, 4, 5, 6, 7, 8, 8, 8))
        at_once = numbers.random() < 0.3
        self.parts = [self._part(at_once) for _ in range(count)]
        self.parallel = numbers.choice((2, 4, 8, 8, 8))
        self.budget = numbers.choice((None, None, None, 4_000_000, 400_000))
        self.late = numbers.choice(((0,), (0, 0, 0, 1), (0, 2, 9)))
        self.schedule = (
            RandomPolicy(numbers) if numbers.random() < 0.7 else SlicePolicy(numbers.choice((8, 32, 512)), 0.05)
        )

    def _part(self, at_once: bool) -> Part:
        numbers = self._numbers
        prompt = self._prompt()
        self._prompts.append(prompt)
        grammar = numbers.choice(GRAMMARS) if numbers.random() < 0.4 else ""
        spec = RequestSpec(tuple(prompt), numbers.choice((1, 2, 15, 25, 40)), self._options(), "", EOS, grammar)
        if numbers.random() < 0.25:
            said = text_of([token for token in oracle_answer(self._name, spec).tokens if token not in EOS])
            at = numbers.randrange(len(said)) if said else 0
            spec = spec._replace(stop=said[at : at + numbers.randint(1, 3)])
        leaves = numbers.choice(PHASES) if numbers.random() < 0.3 else ""
        return Part(spec, 0 if at_once else numbers.choice((0, 1, 5, 20)), leaves, numbers.randint(1, 12))

    def _prompt(self) -> list[int]:
        numbers = self._numbers
        if self._prompts and numbers.random() < 0.15:
            return list(numbers.choice(self._prompts))
        if numbers.random() < 0.1:
            return [numbers.randrange(VOCAB)]
        shared = numbers.choice(self._bases)[: numbers.choice((0, 40, 60, 75))]
        return [*shared, *(numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 25)))]

    def _options(self) -> SamplingOptions:
        numbers = self._numbers
        penalised = numbers.random() < 0.35
        return SamplingOptions(
            temperature=numbers.choice((0, 0, 0.7, 1.5)),
            top_k=numbers.choice((0, 0, 5, 20)),
            top_p=numbers.choice((0, 0, 0.8)),
            min_p=numbers.choice((0, 0, 0.1)),
            repeat_penalty=numbers.choice((0, 1.3, 0.9)) if penalised else 0,
            presence_penalty=numbers.choice((0, 0.5)) if penalised else 0,
            frequency_penalty=numbers.choice((0, 0.3)) if penalised else 0,
            repeat_last_n=numbers.choice((4, 64, -1)) if penalised else 0,
            seed=numbers.randrange(1 << 40),
            logprobs=numbers.random() < 0.4,
            top_logprobs=numbers.choice((0, 1, 5)),
        )

    def make_engine(self) -> TinyEngine:
        engine = TinyEngine(
            self._name,
            self.schedule,
            parallel=self.parallel,
            budget=self.budget,
            eos=EOS,
            first_tokens=True,
        )
        engine.late = lambda: self._numbers.choice(self.late)
        engine.forward.error = MemoryError
        return engine

    def disturb(self, engine: TinyEngine) -> None:
        """Lets one of the next forwards find no memory, now and then."""
        if self.more and self._numbers.random() < 0.02:
            engine.forward.breaks = at_call(self._numbers.randint(1, 3))


def play(mix: Mix) -> TinyEngine:
    """Runs a mix to its end, and checks everything that holds for every mix."""
    engine = mix.make_engine()
    drafters = told(engine, "random") if mix.more == "drafts" else []
    coming, wait = list(mix.parts), 0
    here: list[tuple[Part, ClientRequest]] = []
    while coming or not engine.idle:
        while coming and (wait >= coming[0].wait or engine.idle):
            here.append((coming[0], engine.submit(coming.pop(0).spec)))
            wait = 0
        mix.disturb(engine)
        engine.advance()
        wait += 1
        assert engine.slices < 5000
        assert engine.running() <= mix.parallel
        for part, asked in here:
            part.leave(engine, asked)
    engine.check()
    for part, asked in here:
        assert asked.finished or asked.request.cancelled or (asked.failed and mix.more)
        assert part.leaves or asked.finished or (asked.failed and mix.more)
    assert mix.more != "drafts" or any(drafter.rounds for drafter in drafters)
    return engine


def ask_again(engine: TinyEngine, numbers: random.Random) -> None:
    """Sends one of the prompts again: it is taken from the cache, and the answer is right."""
    first = numbers.choice(engine.requests)
    again = engine.submit(first.spec)
    engine.finish()
    again.check_answer()
    engine.check_cache()
    # An answer that its grammar forces from beginning to end needs no prompt to be read.
    read = first.finished and not first.spec.grammar
    if read and engine.trie.budget_bytes is None and engine.kind.name in SLICEABLE:
        assert again.cached == len(again.spec.prompt) - 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_in_any_mix_each_request_gets_the_answer_it_gets_alone(name: str, seed: int) -> None:
    engine = play(Mix(name, seed))
    ask_again(engine, random.Random(seed))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *itertools.product(("llama", "gemma3", "qwen3_next", "falcon_h1", "quantized"), (0, 1)),
        *itertools.product(("mamba2", "deepseek_v3", *OTHERS), (4, 5)),
    ],
)
def test_in_any_mix_with_drafts_too(name: str, seed: int) -> None:
    play(Mix(name, seed, "drafts"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 125))
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_in_many_mixes_each_request_gets_the_answer_it_gets_alone(name: str, seed: int) -> None:
    engine = play(Mix(name, seed))
    for _ in range(3):
        ask_again(engine, random.Random(seed))
