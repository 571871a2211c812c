"""Checks in steps, run to their end."""

from typing import TypeVar, cast

from runner.engine.ports import Steps, Vision

Result = TypeVar("Result")


def result_of(steps: Steps[Result], vision: Vision | None = None) -> Result:
    """The result of a check. `vision` decodes what it yields; without one it must yield no media."""
    try:
        while True:
            prompt = next(steps)
            assert prompt is None or vision is not None, "media have to be decoded"
            if prompt is not None and vision is not None:
                for decoding in vision.decode(prompt, lambda: False):
                    decoding.result()
    except StopIteration as end:
        return cast("Result", end.value)
