"""An experiment with a model, one slice at a time, which finds out what the model allows."""

from collections.abc import Callable, Generator

import mlx.core as mx

from runner.cache.layers.generic import gather

MakeLayers = Callable[[], list[object]]
Forward = Callable[[mx.array, list[object]], mx.array]

SLICE_TOKENS = 16  # the most that an answer waits for beside a prompt, too
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""The largest accepted difference between the logits of several rows at once and those of single rows, in relation to
their spread, in most of the rows that are compared.

Other numbers of rows have other kernels, which round differently. Measured over all architectures (tiny ones with
random weights, which amplify rounding), rounding alone costs 0.0007 in the median architecture and up to 0.009 in nine
of ten for float16, 0.027 and 0.13 for bfloat16; other kernels change a part of that. float32 may have the 10 bits of
float16 on GPUs. Single steps are off by up to 1.6, where two experts are nearly tied, so one step alone does not count.
"""


class Trial:
    """Computes the slices of an experiment until it shows a fault, or none. Owner: the engine thread."""

    def __init__(self, slices: Generator[None, None, str]) -> None:
        """`slices` yields after each slice, and returns the fault."""
        self.fault: str | None = None
        """The reason why the model does not allow what is tried, for the log; empty if it does, None while unknown."""
        self._slices = slices

    def advance(self) -> None:
        """Computes one slice, until the fault is known. Never raises."""
        if self.fault is not None:
            return
        try:
            next(self._slices)
        except StopIteration as end:
            self.fault = end.value
        except Exception as error:  # models raise anything when given what they do not expect
            self.fault = first_line(error)
        if self.fault is not None:  # only now: the error held the trial's arrays
            self._slices.close()
            mx.clear_cache()  # the trial leaves nothing behind


def first_line(error: Exception) -> str:
    """Returns the first line of an error, for the log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def most(off: list[float]) -> float:
    """Returns the lower of the medians of some differences: single ones do not count."""
    return sorted(off)[(len(off) - 1) // 2]


def verdict(off: float, layers: list[object]) -> str:
    """Returns the fault of a trial whose logits are off by so much, over these layers; empty if it is rounding."""
    coarse = any(array.dtype == mx.bfloat16 for array in gather(layers, set()))
    return "" if off <= (_LIMIT_BFLOAT16 if coarse else _LIMIT) else f"the logits of a trial are off by {off:.2f}"
