"""mlx-vlm as an oracle for recordings, without running the `__init__` of its packages, which import everything.

It needs the package and Pillow in a folder of their own, without what else mlx-vlm asks for:

    pip install --no-deps --target FOLDER mlx-vlm==0.7.10 pillow
"""

import importlib
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def register(folder: Path, models: Iterable[str]) -> None:
    """Makes the modules of these models importable from FOLDER."""
    sys.path.append(str(folder))
    for name in ("mlx_vlm", "mlx_vlm.models", "mlx_vlm.speculative", *(f"mlx_vlm.models.{model}" for model in models)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package


def module(name: str) -> Any:
    """Returns a module of `mlx_vlm.models`, which is not installed where this is type-checked."""
    return importlib.import_module(f"mlx_vlm.models.{name}")
