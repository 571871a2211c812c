"""The sampling options of one request: the values that a client sends, and their normal form."""

import os
from collections.abc import Iterator
from math import inf
from typing import Self

import msgspec

_SMALLEST_TEMPERATURE = 2.0**-126
"""The smallest normal float32. Some devices treat smaller numbers as zero, and 0/0 is NaN."""
_LARGEST_PENALTY = 2.0**100
"""The largest penalty. Larger penalties would have no more effect, and infinity times 0 occurrences is NaN."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling options of one request, as the client sends them: a missing option is zero, and zero means off.
    `repeat_last_n` is in tokens; a negative value stands for the context length. A missing or negative `seed` stands
    for a random seed."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    repeat_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 0
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    candidates: tuple[int, ...] = ()
    """Tokens whose log-probabilities the result has in place of those of the most probable tokens."""

    def normalised(self, vocab_size: int, context_length: int) -> Self:
        """Returns equivalent options in which each option that is off has a fixed value.

        These values are temperature 0 (greedy), top_k 0, top_p 1, min_p 0, repeat_penalty 1, top_logprobs 0 and, if all
        penalties are off, repeat_last_n 0. A request without a seed gets a random seed of 64 bits.
        """
        last_n = context_length if self.repeat_last_n < 0 else min(self.repeat_last_n, context_length)
        return msgspec.structs.replace(
            self,
            temperature=self.temperature if self.temperature >= _SMALLEST_TEMPERATURE else 0.0,
            top_k=self.top_k if 0 < self.top_k < vocab_size else 0,
            top_p=self.top_p if 0 < self.top_p < 1 else 1.0,
            min_p=self.min_p if 0 < self.min_p <= 1 else 0.0,
            repeat_penalty=_clipped(self.repeat_penalty, 1 / _LARGEST_PENALTY) if self.repeat_penalty > 0 else 1.0,
            presence_penalty=_clipped(self.presence_penalty, -_LARGEST_PENALTY),
            frequency_penalty=_clipped(self.frequency_penalty, -_LARGEST_PENALTY),
            repeat_last_n=last_n if self._penalised else 0,
            seed=self.seed if self.seed is not None and self.seed >= 0 else int.from_bytes(os.urandom(8), "little"),
            top_logprobs=min(max(self.top_logprobs, 0), vocab_size) if self.logprobs else 0,
        )

    def out_of_range(self) -> Iterator[tuple[str, float, str]]:
        """Yields the name and the value of each option outside its range, and the value that `normalised` gives it."""
        if self.temperature < 0:
            yield "temperature", self.temperature, "0"
        for name, most in (("top_p", 1.0), ("min_p", 1.0), ("repeat_penalty", inf)):
            if not 0 <= (value := getattr(self, name)) <= most:
                yield name, value, "off"

    @property
    def _penalised(self) -> bool:
        repeated = self.repeat_penalty > 0 and self.repeat_penalty != 1
        return repeated or self.presence_penalty != 0 or self.frequency_penalty != 0


def _clipped(penalty: float, smallest: float) -> float:
    return min(max(penalty, smallest), _LARGEST_PENALTY)
