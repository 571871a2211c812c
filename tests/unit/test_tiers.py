"""The table of tiers names tests that exist; a run tells of its limits; rows of pairs leave out none."""

import ast
import os
from functools import cache
from itertools import combinations, product
from pathlib import Path

from tests import ROOT
from tests.lib.pairs import pairs
from tests.limits import SHOWN, lines
from tests.tiers import ASIDE, FULL, aside, is_full, is_full_file, may_hold


@cache
def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_each_row_names_a_test_or_a_file() -> None:
    """If it was renamed: rename it in tests/tiers.py too, or the fast tier runs all of it."""
    rows = [key.partition("::") for key in (*FULL, *(key for tests in ASIDE.values() for key in tests))]
    assert [path for path, *_ in rows if not (ROOT / path).is_file() and not path.endswith("/")] == []
    assert [path for path, *_ in rows if path.endswith("/") and not [*(ROOT / path).glob("test_*.py")]] == []
    assert [(path, name) for path, _, name in rows if name and name not in names_in(ROOT / path)] == []


def test_the_longest_key_and_the_patterns_count() -> None:
    name = "tests/process/faults/test_restart.py::test_it_restarts"
    assert is_full(f"{name}_after_twenty_kills_in_all_phases")
    assert not is_full(f"{name}_on_the_same_port_after_a_kill")
    assert is_full("tests/tools/conformance/test_conformance.py::test_case[40-eos-F]")
    assert not is_full("tests/tools/conformance/test_conformance.py::test_case[40-eos-H]")
    assert is_full("tests/model/engine/test_counts.py::test_anything[0-mamba2]")
    assert not is_full("tests/model/engine/test_counts.py::test_anything[0-llama]")
    assert not is_full("tests/unit/cache/test_trie.py::test_salts_share_nothing")


def test_a_file_without_a_test_of_the_tier_is_not_collected() -> None:
    """A row for one of its tests keeps it."""
    assert is_full_file("tests/process/hostile/test_bodies.py")
    assert not is_full_file("tests/process/faults/test_restart.py")
    assert not is_full_file("tests/unit/cache/test_trie.py")
    files = ("tests/model/ranks/test_share.py", "tests/model/engine/test_ranks.py", "tests/unit/cache/test_trie.py")
    assert [may_hold("ranks", path) for path in files] == [True, True, False]


def test_capabilities_that_were_never_measured_have_tiers_of_their_own() -> None:
    together = "tests/model/engine/test_drafts.py::test_each_answer_is_the_one_that_it_is_alone"
    assert aside("tests/model/drafts/heads/test_drafter.py::test_a_draft") == "models-that-draft"
    assert aside(f"{together}[a head-greedy-right-2]") == "models-that-draft"
    assert aside("tests/process/ranks/test_answers.py::test_an_answer[1]") == "ranks"
    assert aside(f"{together}[llama-greedy-right-2]") == aside("tests/model/drafts/test_own_model.py::test_it") == ""


def test_a_run_within_its_limits_is_one_line() -> None:
    said = "3 min 20 s, 7 min 40 s of processor time (limits of the fast tier on two quiet cores: 4 min 0 s, 8 min 0 s)"
    for others in (None, 0.1):
        assert list(lines("fast", 200, 460, {"a.py": 3.0}, others)) == [said]


def test_a_run_on_a_busy_machine_says_which_figure_counts() -> None:
    _, busy = lines("fast", 200, 460, {"a.py": 3.0}, 1.26)
    assert busy == f"Other programs used 1.3 of the {os.cpu_count()} cores: compare only the processor time."


def test_a_run_above_one_names_the_most_expensive_files() -> None:
    files = {f"{number}.py": float(number) for number in range(99)}
    for wall_s, processor_s in ((241, 1), (1, 481)):
        _, why, *rows = lines("fast", wall_s, processor_s, files, None)
        assert why.startswith("Above its limit")
        assert rows[0].split() == ["98.0", "s", "98.py"]
        assert len(rows) == SHOWN


def test_every_two_values_of_different_axes_meet() -> None:
    axes = ("abcdefg", "1234", "xyz", "!")
    rows = pairs(*axes)
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
    assert len(rows) < 40  # of 84
    assert rows == pairs(*axes)
