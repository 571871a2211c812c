"""The runner with a fault in it, as a script: `FAULT` names what goes wrong. Only mlx-lm and MLX are touched.

* `slow-load`  reading a tensor file takes ten seconds
* `forward`    a forward over the id in `FAULT_TOKEN` raises
"""

import os
import sys
import time
from collections.abc import Callable

from runner import blas


def slow_load() -> None:
    """Every `mx.load` sleeps first."""
    import mlx.core as mx

    load = mx.load

    def slow(*arguments: object, **options: object) -> object:
        time.sleep(10)
        return load(*arguments, **options)  # type: ignore[arg-type]  # as they came

    mx.load = slow  # type: ignore[assignment]


def forward() -> None:
    """The llama refuses one token, with a text that a host must never see as it is written in a log."""
    import mlx.core as mx

    import runner.mlxlm  # noqa: F401  (registers mlx_lm without its __init__)

    # isort: split
    from mlx_lm.models import llama

    call: Callable[..., mx.array] = llama.Model.__call__
    wanted = int(os.environ["FAULT_TOKEN"])

    def faulty(model: llama.Model, inputs: mx.array, *arguments: object, **options: object) -> mx.array:
        if mx.any(inputs == wanted):
            raise RuntimeError("Error: mlx: the forward is broken")
        return call(model, inputs, *arguments, **options)

    setattr(llama.Model, "__call__", faulty)  # noqa: B010  (a checked assignment to a method is not possible)


def main() -> None:
    blas.preload()
    {"slow-load": slow_load, "forward": forward}[os.environ["FAULT"]]()
    from runner.__main__ import main as run

    run()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not top-level ones
    main()
