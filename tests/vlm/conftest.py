"""The tests of this folder need mlx-vlm, which `scripts/test --vlm` installs."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("mlx_vlm") else ["test_*.py"]
