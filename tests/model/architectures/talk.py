"""A conversation over a trie, at which several questions look."""

from collections.abc import Sequence
from pathlib import Path

from runner.cache.checkpoints import CheckpointPolicy
from scripts.tools.models.architectures import BOUNDARY_DEPENDENT
from scripts.tools.models.tiny import Tiny, words
from tests.lib.driver import Answer, ask, check_trie
from tests.lib.rounds import contents
from tests.model.cache.test_disk import Process

PROMPT = words(41, seed=1)  # longer than the windows and chunks of all models
FOREIGN = words(28, seed=2)  # its answer goes beyond them
LEAST_TOKENS = 32
"""For the disk: less than the shortest prompt, and as long as the windows."""


def started(tiny: Tiny, directory: Path) -> Process:
    """A process with the cache of the runner, which also keeps short prompts on disk."""
    process = Process(tiny, directory, policy=CheckpointPolicy())
    process.unsaved.least = LEAST_TOKENS
    return process


class Talk:
    """A conversation over a trie: a prompt, another user's, the first one again with more, and with something else.

    The process wrote what it knew to disk before the third.
    """

    def __init__(self, tiny: Tiny, directory: Path) -> None:
        self.tiny, self.directory = tiny, directory
        self.chunk, self.other_chunk = (1, 1) if tiny.name in BOUNDARY_DEPENDENT else (24, 64)
        """The tokens of a forward, and those of one to compare with."""
        process = started(tiny, directory)
        self.told: list[object] = []
        """What the cache held after each answer."""
        self.asked: list[tuple[Sequence[int], Answer]] = []

        def say(prompt: Sequence[int], count: int) -> Answer:
            self.asked.append((prompt, answer := ask(tiny, process.cache, prompt, say=count, chunk=self.chunk)))
            check_trie(process.cache)
            self.told.append(contents(process.cache))
            return answer

        say(PROMPT, 0)
        say(FOREIGN, 6)
        self.saved = process.save()
        self.back = say([*PROMPT, *words(12, seed=3)], 4)
        self.edited = say([*PROMPT, *words(9, seed=5)], 1)
        say([*PROMPT[:25], *words(9, seed=9)], 0)
