"""A linear that keeps its input and output within bounds, as some towers of Gemma 4 have them."""

import mlx.core as mx
from mlx.nn.layers.linear import Linear

from runner.model.towers.tower import Layer

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClampedLinear(Layer):
    """A linear without a bias. If `clamped`, its input and output are kept within bounds."""

    def __init__(self, inputs: int, outputs: int, clamped: bool) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=False)
        if clamped:
            self.input_min = self.output_min = mx.array(-mx.inf)
            self.input_max = self.output_max = mx.array(mx.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if "input_min" not in self:
            return self.linear(x)
        # A bound of another type would change that of the whole array.
        low, high, least, most = (mx.array(self[name], x.dtype) for name in BOUNDS)
        return mx.clip(self.linear(mx.clip(x, low, high)), least, most)

    def free(self) -> None:
        """Takes the bounds away."""
        for name in BOUNDS:
            self.pop(name, None)
