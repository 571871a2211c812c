"""Stores a published model as some generation of Ollama does, and checks it there."""

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.model import OpenedModel, open_model
from runner.model.weights.loading import load
from scripts.tools.models.layouts import HEAD, Layout, Plan, plan
from scripts.tools.models.oracle import oracle
from scripts.tools.models.sources import SOURCES
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.store import source_tensors, write_blobs
from scripts.tools.models.tensors import Quantization, Writer
from tests.model.loading.conftest import run, same


class Stored(NamedTuple):
    """Stores the source `name`, published in `source_dir`, under `root`, according to `plan`."""

    name: str
    source_dir: Path
    root: Path
    plan: Plan

    @property
    def models_dir(self) -> Path:
        return self.root / "models"

    def open(self) -> OpenedModel:
        return open_model(self.name, self.models_dir)

    def modules(self) -> tuple[Module, Module]:
        """The model loaded from the store, and the expected one."""
        return load(self.open()).module, oracle(self.root / "mlx", self.name, self.source_dir, self.plan.packings)

    def assert_computes_what_the_source_does(self, *, in_float32: bool = False) -> None:
        """`in_float32` casts both models, since CPUs cannot compute experts in bfloat16."""
        found, wanted = self.modules()
        if in_float32:
            found.set_dtype(mx.float32)
            wanted.set_dtype(mx.float32)
        assert same(run(found), run(wanted))

    def assert_holds_what_the_source_does(self) -> None:
        """Asserts equal numbers. Rows may be columns in the source, which changes the last digits of sums."""
        found, wanted = self.modules()
        numbers = dict(tree_flatten(wanted.parameters()))
        parameters = dict(tree_flatten(found.parameters()))
        assert parameters.keys() == numbers.keys()
        assert all(mx.array_equal(array, numbers[key]) for key, array in parameters.items())
        assert close(run(found), run(wanted))

    def assert_reads_the_text_model_only(self) -> None:
        """Asserts that everything is read except towers, token prediction, drafts and useless tensors."""
        opened, source = self.open(), SOURCES[self.name]
        blobs = [blob for blob in self.plan.blobs if not blob.origins <= source.spare.keys()]
        needed = sum(blob.nbytes for blob in blobs)
        useless = sum(blob.nbytes for blob in blobs if blob.origins <= source.leftovers.keys())
        assert needed - useless <= opened.total_bytes <= needed
        keys = {entry.key for tensor in opened.tensors.values() for entry in tensor.parts}
        assert keys <= {key for blob in blobs for key in blob.tensors}


def close(left: mx.array, right: mx.array, tolerance: float = 2e-5) -> bool:
    """Asserts equality up to a part of the largest number; the default allows another order of additions."""
    return left.dtype == right.dtype == mx.float32 and bool(
        mx.abs(left - right).max() < tolerance * mx.abs(right).max()
    )


def put(
    root: Path,
    name: str,
    source_dir: Path,
    quantization: Quantization | None = None,
    layout: Layout = HEAD,
    *,
    writer: Writer = "compact",
    draft: bool = False,
) -> Stored:
    """Writes the published directory `source_dir` of the source called `name` into a store below `root`."""
    decided = plan(source_tensors(source_dir), read_config(source_dir), quantization, layout)
    write_blobs(root / "models", name, source_dir, decided.blobs, quantization, writer=writer, draft=draft)
    return Stored(name, source_dir, root, decided)
