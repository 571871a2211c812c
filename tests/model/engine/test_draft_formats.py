"""An answer that follows a format is the same with drafts as without them: the grammar looks ahead along them."""

import random

import pytest

from scripts.tools.models.tiny import words
from tests.lib.tiny_engine import RandomPolicy, TinyEngine
from tests.lib.told_drafts import EOS, OPTIONS, STRATEGIES, conversation, spec, told

GRAMMARS = {
    "digits": "start: /[0-9]{4,30}/",
    "an end that depends": 'start: ("<>" /[1-3]/)* "."',
    "forced text between": 'start: (/[0-9]/ "<=====>")* "!"',
    "alternatives": 'start: ("123, " | "45, " | "1236789; ")+ "!!!"',
    "nested": 'start: value\nvalue: "(" (value ("," value)*)? ")" | /[1-3]{1,3}/',
    "anything": "start: /[^9]*/",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", ["greedy", "drawn", "penalties", "log-probabilities"])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_drafts_change_nothing_in_a_format(name: str, grammar: str, options: str, strategy: str) -> None:
    asked = spec(options, 24)._replace(grammar=GRAMMARS[grammar])
    for eos in (frozenset[int](), frozenset({EOS})):
        wanted, _ = conversation(name, asked._replace(eos=eos))
        found, drafters = conversation(name, asked._replace(eos=eos), strategy)
        assert found == wanted
        if strategy == "right" and grammar == "digits":
            assert any(right > 1 for drafter in drafters for _, right in drafter.rounds)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_masks_may_be_late_among_rounds(name: str, seed: int) -> None:
    numbers = random.Random(seed)
    engine = TinyEngine(name, RandomPolicy(numbers))
    engine.late = lambda: numbers.choice((0, 0, 0, 1, 2))
    drafters = told(engine, "random")
    for number in range(8):
        asked = spec(numbers.choice([*OPTIONS]), numbers.randint(3, 30), prompt=words(20 + number % 3, number % 2))
        engine.submit(asked._replace(grammar=numbers.choice(["", *GRAMMARS.values()])))
        engine.advance(numbers.randint(0, 60))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
    engine.finish()
    engine.check()
    assert any(drafter.rounds for drafter in drafters)
