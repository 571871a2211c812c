"""DBRX's experts are computed together, with the results of mlx-lm's own."""

from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize

from runner.model.weights.parameters import parameters_of
from scripts.tools.models import architectures


def mlx_own(mended: ModuleType) -> ModuleType:
    """Returns mlx-lm's module as it is without us."""
    assert mended.__file__ is not None
    spec = spec_from_file_location("mlx_lm.models.unmended", mended.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def joined(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns the weights as in the source: those of all experts are rows of one matrix."""
    apart = [name for name in weights if ".experts.0." in name]
    for name in apart:
        parts = [weights.pop(name.replace("experts.0", f"experts.{expert}")) for expert in range(4)]
        rows = mx.concatenate([part.T if ".w2." in name else part for part in parts])
        weights[name.replace(".experts.0.", ".experts.mlp.").removesuffix(".weight")] = rows
    return weights


@pytest.mark.parametrize("form", ["apart", "joined", "packed"])
def test_experts_that_are_computed_together_are_those_of_mlx_lm(form: str) -> None:
    mended = architectures.module_of("dbrx")
    config = architectures.config("dbrx")
    plain, model = (each.Model(each.ModelArgs.from_dict(config)) for each in (mlx_own(mended), mended))
    for each in (plain, model):
        each.eval()
        if form == "packed":
            quantize(each, 32, 4)
    weights = dict(reversed(parameters_of(plain).items()))
    weights = model.sanitize(joined(weights) if form == "joined" else weights)
    model.load_weights(list(weights.items()))
    tokens = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    assert mx.allclose(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
