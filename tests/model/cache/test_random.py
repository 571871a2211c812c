"""Random sequences of prompts through the single-entry cache give the tokens that no cache gives.

One model for every kind of layer cache; the operations are what users and their clients do to a conversation, and what
can go wrong in the middle of it. After every request the layers stand at the end of the record. A trie caches at least
as much.

The numbered scenarios are those of docs/internals/cache.md, section 8: 1 to 6, 8 and 79.
"""

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from runner.cache.single import SingleEntryCache
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import KINDS, VOCAB, tiny
from tests.lib.driver import Accident, ask, ask_uncached, check_equal, check_level

MAX_PROMPT = 90

words = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


class Step(NamedTuple):
    """One request: a prompt made from the conversation so far, and what befalls it."""

    change: str  # extend, branch, truncate, resend, unrelated
    share: float  # of the conversation that a branch or a truncation keeps
    new: list[int]
    say: int
    chunk: int
    accident: Accident | None

    def prompt(self, history: list[int]) -> list[int]:
        """The tokens asked, never empty."""
        kept = int(len(history) * self.share)
        made = {
            "extend": [*history, *self.new],
            "branch": [*history[:kept], *self.new],
            "truncate": history[: max(kept, 1)] or self.new,
            "resend": history or self.new,
            "unrelated": self.new,
        }[self.change]
        return made if len(made) <= MAX_PROMPT else self.new


accidents = st.builds(Accident, st.sampled_from(["cancel", "skip", "break", "poison"]), st.integers(0, 9))
steps = st.builds(
    Step,
    change=st.sampled_from(["extend", "extend", "branch", "truncate", "resend", "unrelated"]),
    share=st.floats(0, 1),
    new=words,
    say=st.integers(0, 6),
    chunk=st.sampled_from([1, 5, 16, 64]),
    accident=st.one_of(st.none(), st.none(), accidents),
)
conversations = st.lists(steps, min_size=2, max_size=8)


def replay(kind: str, conversation: list[Step]) -> None:
    """Runs the steps through one cache, each against a run without."""
    model = tiny(kind)
    cache, trie = SingleEntryCache(model.make_layers), TrieCache(model.make_layers)
    history: list[int] = []
    accidents = 0
    for step in conversation:
        prompt = step.prompt(history)
        answer = ask(model, cache, prompt, say=step.say, chunk=step.chunk, accident=step.accident)
        check_level(cache)
        check_equal(model, answer, ask_uncached(model, prompt, say=len(answer.logits), chunk=step.chunk))
        session = answer.session
        other = ask(model, trie, prompt, say=step.say, chunk=step.chunk, accident=step.accident)
        accidents += step.accident is not None
        assert accidents or other.session.cached >= session.cached  # a trie's forwards are others
        event(f"cached: {'all' if session.cached == session.matched else 'some' if session.cached else 'nothing'}")
        history = [*prompt, *answer.tokens]


def _settings(examples: int, derandomize: bool) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_prompts_gives_the_tokens_of_no_cache(kind: str) -> None:
    _settings(8, derandomize=True)(given(conversations)(lambda steps: replay(kind, steps)))()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_sequences_of_prompts_give_the_tokens_of_no_cache(kind: str) -> None:
    _settings(200, derandomize=False)(given(conversations)(lambda steps: replay(kind, steps)))()
