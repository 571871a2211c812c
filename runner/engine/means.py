"""What the requests of one engine have in common."""

from collections.abc import Callable
from typing import NamedTuple

from runner.cache import PrefixCache
from runner.engine.generation import Forward
from runner.engine.memory import Memory
from runner.tokenizer import Tokenizer


class Means(NamedTuple):
    """What requests are computed with."""

    forward: Forward
    tokenizer: Tokenizer
    context_length: int
    make_cache: Callable[[], PrefixCache]
    memory: Memory
    salt: str = ""
    """Names what changes the meaning of what the cache keeps: prompts of different salts share nothing."""
    find_fault: Callable[[], str] = lambda: ""
    """Why the model cannot decode several rows in one forward, or nothing. Takes some forwards."""
