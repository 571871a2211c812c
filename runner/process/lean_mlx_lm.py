"""mlx-lm's model and cache classes without mlx-lm's package `__init__`.

`mlx_lm/__init__.py` imports the conversion and generation tools, and with them transformers, which takes a second. A
runner never needs them. Importing this module first registers the package under its name without running its
`__init__`. Then `from mlx_lm.models import llama` imports only that file and its own imports. If mlx-lm is already
imported, nothing changes.

The modules of `runner/model/modules` and `runner/embeddings/modules` are found under the same package, after mlx-lm's.
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
    """Lets `mlx_lm.models.NAME` also be found among our modules, if mlx-lm has none of that name."""
    importlib.import_module("mlx_lm.models").__path__.extend(map(str, _OURS))


_OURS = [Path(__file__).parent.parent / part / "modules" for part in ("model", "embeddings")]

_register()
_add_ours()
