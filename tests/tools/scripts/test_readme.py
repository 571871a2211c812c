"""The generated parts of the documents: what they say, and where they are put."""

import re
import subprocess
import sys

import pytest

from runner.cli.flags import FLAGS
from runner.model.families import FAMILIES, METAL_ONLY, architecture_of, family_of
from scripts.tools.docs.generate import _NOT_RUNNING, architecture_table, flag_table, marks, with_parts
from scripts.tools.models.architectures import architectures, unserved


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_flag_has_a_row_with_its_variable() -> None:
    rows = flag_table().splitlines()[2:]
    assert len(rows) == len(FLAGS)
    for flag, row in zip(FLAGS, rows, strict=True):
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


def test_the_other_model_types_are_all_that_would_be_run() -> None:
    """By the function that chooses the module of a model, and by mlx-lm's own list of modules."""
    _, _, paragraph = architecture_table().partition("\n\n")
    paragraph = " ".join(paragraph.split())
    _, *types = code_spans(paragraph)
    assert types == sorted(set(types), key=str.casefold)
    for model_type in types:
        config: dict[str, object] = {"model_type": model_type}
        assert family_of(architecture_of(config, from_store=False), config).module
    in_table = {family.module for family in FAMILIES.values()}
    assert set(types) >= set(architectures()) - in_table - _NOT_RUNNING
    assert not set(types) & (in_table | _NOT_RUNNING)
    assert _NOT_RUNNING <= unserved().keys() <= _NOT_RUNNING | METAL_ONLY
    assert all(f"`{name}` (Apple Silicon only)" in paragraph for name in METAL_ONLY)


def test_the_list_is_made_without_importing_a_model() -> None:
    code = (
        "import sys; from scripts.tools.docs.generate import architecture_table; architecture_table()\n"
        "print([name for name in sys.modules if name.startswith(('mlx_lm.models.', 'transformers'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def page(*parts: str) -> str:
    lines = (["# ", part, "\n", "old rows\n".join(marks(part)), "between\n"] for part in parts)
    return "".join(word for words in lines for word in words)


def test_each_part_is_put_between_its_marks_and_nowhere_else() -> None:
    parts = {"one": lambda: "1\n", "two": lambda: "2\n"}
    text = with_parts(page("two", "one"), parts)
    assert text == page("two", "one").replace("old rows", "2", 1).replace("old rows", "1", 1)
    assert with_parts(text, parts) == text


@pytest.mark.parametrize(
    "text",
    [
        page("two"),
        page("one", "one"),
        page("one").replace(marks("one")[1], ""),
        "".join(reversed(marks("one"))),
    ],
)
def test_marks_that_are_not_there_or_twice_are_named(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape("wants one <!-- one: python -m scripts.tools.docs.generate --> and, after it")
    ):
        with_parts(text, {"one": lambda: "1\n"})
