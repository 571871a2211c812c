"""scripts/README.md lists every executable, and nothing else."""

import os
import re

from tests import ROOT

SCRIPTS = ROOT / "scripts"


def test_the_readme_has_a_line_for_each_executable() -> None:
    executables = {path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert "demo" in executables
    assert set(re.findall(r"^\| `scripts/([\w-]+)", (SCRIPTS / "README.md").read_text(), re.MULTILINE)) == executables
