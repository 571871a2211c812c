"""Counts the nodes of the graphs of forwards over 12 and over 24 tokens: `python -m scripts.tools.models.nodes
PLATFORM [NAME ...]`.

PLATFORM is `cpu`, `cuda` or `metal`; a NAME is an architecture, or `vlm/PACKAGE` for a package of mlx-vlm. For the
platforms that this machine is not, graphs are built in the way of that platform and not computed. This has to begin
before models are imported, so it takes a process of its own.
"""

import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, cast, get_args
from unittest.mock import patch

from runner import cpu

cpu.preload()

import mlx.core as mx  # noqa: E402 - the kernels must be loaded first

if TYPE_CHECKING:
    from scripts.tools.models.tiny import Tiny

Platform = Literal["cpu", "cuda", "metal"]
LENGTHS = (12, 24)
"""Whole blocks of sparse attention, more than one, and less than a window."""


def main(platform: str, *names: str) -> None:
    """Prints a row for each name, or for each architecture of mlx-lm. Ends with a message for an unknown platform."""
    if platform not in get_args(Platform):
        sys.exit(__doc__)
    pretend(cast("Platform", platform))
    from scripts.tools.models import architectures, vlm  # their modules ask for the platform

    for name in names or [name for name in architectures.architectures() if name not in architectures.unserved()]:
        build = vlm.build if name.startswith("vlm/") else architectures.build
        few, many = count(build(name.removeprefix("vlm/")))
        sys.stdout.write(f"{name} {few} {many}\n")
        sys.stdout.flush()


def count(model: "Tiny") -> list[int]:
    """Returns the nodes of the graphs over LENGTHS tokens: of the logits, and of all that the layers hold."""
    from runner.cache.layers.states import gather
    from runner.model import latent

    found = list[int]()
    for length in (1, *LENGTHS):
        layers = model.make_layers()
        with patch.object(latent, "is_absorbed", lambda *_: False):  # 24 tokens could take another form than 12
            logits = model.logits(mx.array([[1 + place for place in range(length)]]), layers)
        found.append(of_graph(logits, *gather(layers, set())))
        mx.eval(logits)  # the first forward computes constants, and some models change their weights in every one
    return found[1:]


def of_graph(*arrays: mx.array) -> int:
    """Returns the nodes of the graph of arrays that are not computed yet."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


def pretend(platform: Platform) -> None:
    """Makes this process choose the kernels of a platform. Each call of a kernel of a GPU becomes one node."""
    for name in ("cuda", "metal"):
        setattr(getattr(mx, name), "is_available", lambda name=name: name == platform)  # noqa: B010
    if platform != "cpu":
        setattr(mx, "default_device", lambda: mx.Device(mx.gpu))  # noqa: B010  its type is fixed
        setattr(mx.fast, f"{platform}_kernel", _kernel)


def _kernel(*args: object, **kwargs: object) -> Callable[..., Sequence[mx.array]]:
    def call(
        *,
        inputs: Sequence[object],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        **_: object,
    ) -> Sequence[mx.array]:
        outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        depend: Callable[..., Sequence[mx.array]] = mx.depends
        return depend(outputs, [each for each in inputs if isinstance(each, mx.array)])

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
