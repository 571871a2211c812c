"""README and the pages for users match the program."""

import re

import pytest

from runner.cli.commands import SERVER
from runner.settings import flags_of
from scripts.tools.docs.generate import DOCS, DOCUMENTS, PICTURE, with_parts
from scripts.tools.docs.imports import imports_svg
from tests import ROOT

README = ROOT / "README.md"
GENERATED_BY_THE_SUITE = DOCS / "compatibility.md"
PAGES = sorted({README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")} - {GENERATED_BY_THE_SUITE})
_MOST_LINES = 130


def test_the_generated_parts_are_todays() -> None:
    for path, parts in DOCUMENTS.items():
        text = path.read_text()
        assert text == with_parts(text, parts), f"{path}: run python -m scripts.tools.docs.generate"
    assert PICTURE.read_text() == imports_svg(), f"{PICTURE}: run python -m scripts.tools.docs.generate"


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every option that a page may name."""
    taking = [command.settings for command in (SERVER, *SERVER.below) if command.settings]
    names = {flag.name for settings in taking for flag in flags_of(settings).values()} | {"help", "version"}
    names |= {
        "all",
        "full",
        "mutants",
        "llama-server",
        "ctx-size",
        "real",
        "vlm",
        "python",
        "mlx-engine",
        "experimental",
    }  # of scripts/test, hosts, `ollama create`
    names |= {"require-hashes", "no-deps", "no-build-isolation", "local-dir"}  # of pip and hf
    scripts = (path.read_text() for path in (ROOT / "scripts" / "tools").rglob("*.py"))
    return names | {name for text in scripts for name in re.findall(r'"--([a-z][a-z-]*)"', text)}


def test_no_page_names_a_flag_that_does_not_exist(known: set[str]) -> None:
    for path in PAGES:
        text = re.sub(r"curl [^\n]*", "", path.read_text())
        assert set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text)) <= known, path


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= _MOST_LINES
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([\w/.-]+\.md)\)", text)}
    assert linked >= {path.resolve() for path in PAGES} - {README}


def logged() -> list[str]:
    """The messages in the table of log lines."""
    _, _, table = (DOCS / "operating.md").read_text().partition("| `msg` |")
    return re.findall(r"^\| `(.+?)` \|", table.partition("\n\n")[0], re.MULTILINE)


def test_the_log_says_what_operating_explains() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "runner").rglob("*.py"))
    parts = [part.lstrip(", ") for message in logged() for part in message.split(" ...")]
    assert len(parts) > 20
    assert [part for part in parts if part not in sources] == []
