"""This runner, failing in every forward over the token in `FAULT_TOKEN`, as a script."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[3])  # not this folder: its modules are no top-level ones

from runner import cpu  # noqa: E402


def main() -> None:
    """Runs the runner. The fault's text is one that a host must never see as it is written in a log."""
    cpu.preload()
    import mlx.core as mx

    import runner.process.lean_mlx_lm  # noqa: F401  (registers mlx_lm without its __init__)

    # isort: split
    from mlx_lm.models import llama

    from runner.__main__ import main as run

    call: Callable[..., mx.array] = llama.Model.__call__
    wanted = int(os.environ["FAULT_TOKEN"])

    def faulty(model: llama.Model, inputs: mx.array, *arguments: object, **options: object) -> mx.array:
        if mx.any(inputs == wanted):
            raise RuntimeError("Error: mlx: the forward is broken")
        return call(model, inputs, *arguments, **options)

    setattr(llama.Model, "__call__", faulty)  # noqa: B010  (a checked assignment to a method is not possible)
    run()


if __name__ == "__main__":
    main()
