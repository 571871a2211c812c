"""README and the pages for users match the program."""

import contextlib
import plistlib
import re
import shlex
import tomllib

import pytest

from runner.cli.commands import SERVER
from runner.cli.parse import parse_command, parse_ollama
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
    names |= {"all", "full", "mutants", "models-that-draft", "real", "vlm", "python"}  # of scripts/test
    names |= {"llama-server", "ctx-size", "mlx-engine", "experimental"}  # of hosts and `ollama create`
    names |= {"require-hashes", "no-deps", "no-build-isolation", "local-dir"}  # of pip and hf
    names |= {"force", "now"}  # of uv, pipx and systemctl
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


def test_the_readme_installs_what_there_is() -> None:
    text = README.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"\./ollama-mlx-runner\[(\w+)\]", text))
    assert extras == {"cpu", "cuda"} & project["optional-dependencies"].keys()
    locks = set(re.findall(r"(\w+)\.lock", text))
    assert locks == {"core", *extras} & {path.stem for path in (ROOT / "requirements").iterdir()}
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text


def commands() -> list[list[str]]:
    """The words after `mlx-runner` wherever a page has it to be pasted: in a shell, or into a service's file."""
    found: list[list[str]] = []
    for page in PAGES:
        for language, block in re.findall(r"^ *```(\w+)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if language == "xml":
                found.append(plistlib.loads(block.encode())["ProgramArguments"][1:])
            lines = re.findall(r"^ *(?:\w+=\S+ |ExecStart=\S+/)*mlx-runner (.+)$", block, re.MULTILINE)
            found += [shlex.split(line, comments=True) for line in lines]
    return found


def test_every_command_of_a_page_is_one_that_the_program_takes() -> None:
    found = commands()
    assert len(found) > 25
    for words in found:
        with contextlib.suppress(SystemExit):  # of those that print something
            parse_ollama(words[1:]) if words[0] == "ollama" else parse_command(words, {})


def logged() -> list[str]:
    """The messages in the table of log lines."""
    _, _, table = (DOCS / "operating.md").read_text().partition("| `msg` |")
    return re.findall(r"^\| `(.+?)` \|", table.partition("\n\n")[0], re.MULTILINE)


def test_the_log_says_what_operating_explains() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "runner").rglob("*.py"))
    parts = [part.lstrip(", ") for message in logged() for part in message.split(" ...")]
    assert len(parts) > 20
    assert [part for part in parts if part not in sources] == []
