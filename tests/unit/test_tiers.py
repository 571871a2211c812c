"""The table of tiers names tests that exist."""

import ast
from pathlib import Path

from tests import ROOT
from tests.tiers import ALL, FULL, is_full


def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_each_row_names_a_test_or_a_file() -> None:
    """If it was renamed: rename it in tests/tiers.py too, or the fast tier runs all of it."""
    rows = [key.partition("::") for key in FULL]
    assert [path for path, *_ in rows if not (ROOT / path).is_file()] == []
    assert [(path, name) for path, _, name in rows if name and name not in names_in(ROOT / path)] == []


def test_what_stays_whole_would_not_without_its_row() -> None:
    whole = [key for key, kept in FULL.items() if kept is ALL]
    assert [key for key in whole if not key.startswith("tests/model/") and key.partition("::")[0] not in FULL] == []


def test_the_longest_key_and_the_patterns_count() -> None:
    name = "tests/process/faults/test_restart.py::test_it_restarts"
    assert is_full(f"{name}_after_twenty_kills_in_all_phases")
    assert not is_full(f"{name}_on_the_same_port_after_a_kill")
    assert is_full("tests/tools/conformance/test_conformance.py::test_case[1-chat-F]")
    assert not is_full("tests/tools/conformance/test_conformance.py::test_case[1-chat-G]")
    assert is_full("tests/model/engine/test_counts.py::test_anything[0-mamba2]")
    assert not is_full("tests/model/engine/test_counts.py::test_anything[0-llama]")
    assert not is_full("tests/unit/cache/test_trie.py::test_salts_share_nothing")
