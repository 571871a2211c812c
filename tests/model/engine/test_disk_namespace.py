"""Whatever shapes the numbers has a folder and points of its own: nobody takes what another model has computed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import runner.disk.namespace
from runner.disk.namespace import Namespace, namespace_of
from runner.model import open_model
from runner.settings import Settings
from scripts.tools.models.checkpoints import write_checkpoint

from mlx_lm.models.cache import KVCache, RotatingKVCache  # isort: skip


@dataclass(frozen=True)
class Model:
    """A directory, and how it is computed."""

    directory: Path
    patch: pytest.MonkeyPatch
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    salt: str = ""
    make_layers: Callable[[], list[object]] = lambda: [KVCache(), RotatingKVCache(32)]

    def namespace(self) -> Namespace:
        settings = cast("Settings", SimpleNamespace(blas="auto", blas_threads=None, kernels="auto"))
        opened = open_model(str(self.directory), Path("unused"))
        return namespace_of(settings, opened, self.make_layers, self.dtypes, self.salt)

    def patched(self, name: str, value: object) -> "Model":
        self.patch.setattr(runner.disk.namespace, name, value)
        return self


def rewritten(model: Model, pattern: str) -> Model:
    (path,) = model.directory.glob(pattern)
    path.write_bytes(path.read_bytes())
    return model


def reconfigured(model: Model) -> Model:
    config = model.directory / "config.json"
    config.write_text(config.read_text().replace("500000.0", "500001.0").replace("10000.0", "10001.0"))
    return model


CHANGES: dict[str, Callable[[Model], Model]] = {
    "weights": lambda model: rewritten(model, "*.safetensors"),
    "configuration": reconfigured,
    "types": lambda model: replace(model, dtypes=["bfloat16"]),
    "keys and values": lambda model: replace(model, salt="kv8"),
    "window": lambda model: replace(model, make_layers=lambda: [KVCache(), RotatingKVCache(33)]),
    "runner": lambda model: model.patched("__version__", "99"),
    "mlx": lambda model: model.patched(
        "importlib", SimpleNamespace(metadata=SimpleNamespace(version=lambda name: "99" if name == "mlx" else "1"))
    ),
    "device": lambda model: model.patched("device", lambda: "abacus"),
    "processor": lambda model: model.patched("_machine", lambda: "abacus"),
    "BLAS": lambda model: model.patched(
        "cpu",
        SimpleNamespace(
            detect=lambda *_: SimpleNamespace(name="abacus"), find_kernels=lambda _: SimpleNamespace(name="")
        ),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_shapes_the_numbers_shapes_the_name(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(write_checkpoint(tmp_path / "model", "llama"), monkeypatch)
    before = model.namespace()
    after = CHANGES[change](model).namespace()
    assert before.name != after.name
    assert before.root != after.root
    assert before.about != after.about


def test_what_shapes_no_number_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(write_checkpoint(tmp_path / "model", "llama"), monkeypatch)
    before = model.namespace()
    assert rewritten(model, "tokenizer.json").namespace() == before
