"""Makes it possible to import mlx-lm's models and caches without mlx-lm's package `__init__`.

`mlx_lm/__init__.py` imports tools for conversion and generation, and with them transformers, which takes a second. A
runner needs none of these. Importing this module registers mlx_lm without running its `__init__`. After that, `from
mlx_lm.models import llama` imports only `llama.py` and its imports. If mlx_lm is already imported, nothing changes.

Python then also finds the modules of `runner/model/modules` and `runner/embeddings/modules` as `mlx_lm.models.NAME`, if
mlx-lm has no module of that name.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

from runner.errors import RunnerError


def _register() -> None:
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None:
        raise RunnerError(
            "mlx-lm is not installed: pip install --require-hashes -r requirements/cpu.lock (or cuda.lock)"
        )
    sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)


def _add_ours() -> None:
    """Adds the folders `_OURS` to the places where Python looks for `mlx_lm.models.NAME`, after mlx-lm's own folder."""
    importlib.import_module("mlx_lm.models").__path__.extend(map(str, _OURS))


_OURS = [Path(__file__).parent.parent / part / "modules" for part in ("model", "embeddings")]

_register()
_add_ours()
