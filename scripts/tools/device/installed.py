"""The installation, and models as they load: `mlx-runner check --verify` of every kind of layer and packing."""

import logging
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import mlx.core as mx

from runner.commands.check.inspection import inspect
from runner.device import device, usable_bytes
from runner.settings import CheckSettings
from runner.versions import installed, misfits
from scripts.tools import ROOT
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.device.parts import Row, guarded
from scripts.tools.models.checkpoints import CACHE_KINDS, Dtype, write_checkpoint
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization

_PACKAGES = (
    *("mlx", "mlx-lm", "transformers", "tokenizers", "numpy", "aiohttp", "msgspec", "llguidance"),
    *("mlx-cuda-13", "nvidia-cuda-crt", "nvidia-cuda-nvrtc"),
)
_TAG = "device:latest"
_CHECK_S = 120
_FEW = 2


def installation(*, tiny: bool) -> Iterator[Row]:
    """Yields what the file is named after, first; then tries the command line on the demo model."""
    info = mx.device_info()
    backend = "CPU" if device() == "cpu" else "Metal" if mx.metal.is_available() else "CUDA"
    name = str(info.get("device_name") or platform.processor() or platform.machine())
    yield Row(
        "device", f"{name}, {backend}, {usable_bytes() / 1e9:.1f} GB may be used", figures={"device": name, **info}
    )
    versions = {package: installed(package) for package in _PACKAGES}
    versions |= {"python": platform.python_version(), "system": platform.platform()}
    wrong = misfits()
    yield Row("versions", wrong or f"MLX {versions['mlx']}, mlx-lm {versions['mlx-lm']}", not wrong, versions)
    demo = str(ROOT / "scripts" / "demo_model")
    begin = time.monotonic()
    done = subprocess.run([*RUNNER, "check", demo], capture_output=True, text=True, timeout=_CHECK_S, check=False)
    took = {"seconds": round(time.monotonic() - begin, 2)}
    yield Row("mlx-runner check", done.stdout + done.stderr, done.returncode == 0, took)


def layers(*, tiny: bool) -> Iterator[Row]:
    """Yields a row for each kind of layer: plain, windows, states, both, lists, latent, chunked, of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield from guarded(
            lambda kind: [verified(kind, str(write_checkpoint(Path(folder, kind), kind)), Path(folder))],
            CACHE_KINDS[:_FEW] if tiny else CACHE_KINDS,
        )


def packings(*, tiny: bool) -> Iterator[Row]:
    """Yields a row for each type of weights, and for each packing, of a model as `ollama create` writes it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def typed(dtype: Dtype) -> Iterator[Row]:
            yield verified(dtype, str(write_checkpoint(folder / dtype, "llama", dtype=dtype)), folder)

        def packed(packing: Quantization) -> Iterator[Row]:
            write_store(folder / packing, _TAG, plain, packing)
            yield verified(packing, _TAG, folder / packing)

        head = {"tie_word_embeddings": False}  # so that it is packed, too
        plain = write_checkpoint(folder / "plain", "llama", dtype="bfloat16", overrides=head)
        yield from guarded(typed, get_args(Dtype)[1:])
        yield from guarded(packed, get_args(Quantization)[: _FEW if tiny else None])


def verified(name: str, model: str, models_dir: Path) -> Row:
    """Checks a model twice: the first time the device may compile kernels."""
    settings = CheckSettings(model=model, models_dir=models_dir, verify=True, log_level=logging.WARNING)
    times, wrong = list[float](), list[str]()
    for _ in range(2):
        begin = time.monotonic()
        found = inspect(settings)
        times.append(round(time.monotonic() - begin, 2))
        wrong += [*found.problems, *(found.trial.warnings if found.trial else ["it was not tried"])]
    first, again = times
    text = "; ".join(dict.fromkeys(wrong)) or (found.trial.text if found.trial else "")
    return Row(name, f"{text}; {first:.1f} s, again {again:.1f} s", not wrong, {"first_s": first, "again_s": again})
