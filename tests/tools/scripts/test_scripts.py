"""The scripts themselves: their list, `scripts/test --python`, and the generated parts of the documents."""

import os
import re

from runner.model.architectures import FAMILIES
from runner.settings import Settings, flags_of
from scripts.tools.docs.generate import architecture_table, flag_table, marks, with_parts
from tests import ROOT

SCRIPTS = ROOT / "scripts"


def test_the_readme_has_a_line_for_each_executable() -> None:
    executables = {path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert "demo" in executables
    assert set(re.findall(r"^\| `scripts/([\w-]+)", (SCRIPTS / "README.md").read_text(), re.MULTILINE)) == executables


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_flag_has_a_row_with_its_variable() -> None:
    flags = flags_of(Settings).values()
    rows = flag_table().splitlines()[2:]
    assert len(rows) == len(flags)
    for flag, row in zip(flags, rows, strict=True):
        assert row.startswith(f"| `--{flag.name} ")
        assert f"| `{flag.variable}` |" in row
        assert len(re.findall(r"(?<!\\)\|", row)) == 5


def test_every_architecture_of_the_store_is_in_the_table_once() -> None:
    table, _, _ = architecture_table().partition("\n\n")
    _, _, *rows = table.splitlines()
    found = {}
    for row in rows:
        *names, module = code_spans(row)
        found.update(dict.fromkeys(names, module))
    assert found == {name: family.module for name, family in FAMILIES.items()}
    assert len(rows) == len(set(found.values()))


def page(*parts: str) -> str:
    lines = (["# ", part, "\n", "old rows\n".join(marks(part)), "between\n"] for part in parts)
    return "".join(word for words in lines for word in words)


def test_each_part_is_put_between_its_marks_and_nowhere_else() -> None:
    parts = {"one": lambda: "1\n", "two": lambda: "2\n"}
    text = with_parts(page("two", "one"), parts)
    assert text == page("two", "one").replace("old rows", "2", 1).replace("old rows", "1", 1)
    assert with_parts(text, parts) == text
