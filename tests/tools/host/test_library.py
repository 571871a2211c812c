"""The library stands alone: any runner can be tried with it, and nothing of this repository's runner is needed."""

import ast
import sys
from pathlib import Path

import pytest

import scripts.tools.host.lib

FOLDER = Path(scripts.tools.host.lib.__file__).parent
LIBRARY = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith(("test_", "conftest")))
ALLOWED = {*sys.stdlib_module_names, "aiohttp", "scripts"}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.name)
def test_the_library_imports_only_itself_and_aiohttp(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in ALLOWED, name
            assert (
                name.split(".")[0] != "scripts"
                or name == "scripts.tools.host.lib"
                or name.startswith("scripts.tools.host.lib.")
            ), name


def test_what_it_exports_is_there_and_in_order() -> None:
    assert all(hasattr(scripts.tools.host.lib, name) for name in scripts.tools.host.lib.__all__)
    assert len(set(scripts.tools.host.lib.__all__)) == len(scripts.tools.host.lib.__all__)
    assert len(LIBRARY) >= 10, "the test above sees the library"
