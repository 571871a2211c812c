"""Every citation leads somewhere: paths, pages, sections and scenarios named in code, tests, scripts and documents."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.test_house import LAYERS

_SUFFIXES = (".py", ".md", ".toml", ".c", ".h", ".js", ".css", ".html", "")
_DATA = (
    "scripts/demo_model/",
    "scripts/demo_draft_model/",
    "scripts/demo_hearing_model/",
    "scripts/demo_seeing_model/",
    "tests/process/launcher/standin",
)
_PATH = re.compile(
    r"(?<![\w/.~$<{}-])((?:docs|runner|protocol|tests|scripts|requirements)/(?>[\w./-]*\w))(?![\\*{\[])(#[\w-]+)?"
)
_PLACEHOLDER = re.compile(r"/[A-Z]{3,}\b(?!\.md)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ELSEWHERE = ("protocol.md", "caches.md", "perf.md", "field.md", "style.md", "design.md", "house.md")
_IN_SHORT = ("store.md", "wire.md", "cache.md")  # named with their folder where no link leads there
_NUMBERS = r"\d+(?:\.\d+)?(?:(?:, | and | to |-)\d+(?:\.\d+)?)*"
_SECTIONS = re.compile(rf"docs/internals/(wire|store|cache)\.md,? (?:sections? )?({_NUMBERS})")
_SCENARIOS = re.compile(r"[sS]cenarios? (\d+(?:(?:, | and | to )\d+)*)\b")
_BARE_NUMBER = re.compile(r"(?:def test_.*|\"\"\")\s+# [A-F]?\d+(?:, [A-F]?\d+)*$")


def texts() -> list[str]:
    """The text files of the repository, this one left out: it names what it refuses."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    itself = Path(__file__).relative_to(ROOT).as_posix()
    return [
        name
        for name in listed
        if Path(name).suffix in _SUFFIXES and (ROOT / name).is_file() and name != itself and not name.startswith(_DATA)
    ]


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def sections(page: str) -> set[str]:
    """The numbers of a page's headings."""
    return set(re.findall(r"^#+ (\d+(?:\.\d+)?) ", text_of(f"docs/internals/{page}.md"), re.MULTILINE))


def scenarios() -> set[int]:
    """The numbers of the scenarios."""
    _, _, listed = text_of("docs/internals/cache.md").partition("\n## 8 ")
    return {int(number) for number in re.findall(r"^(\d+)\. ", listed, re.MULTILINE)}


def exists(path: str) -> bool:
    """True for a file, a folder, and a module without its suffix."""
    place = ROOT / path
    return place.exists() or place.with_name(f"{place.name}.py").exists()


def broken(name: str, text: str) -> Iterator[str]:
    """The citations in the text of a file that lead nowhere."""
    for path, anchor in _PATH.findall(text):
        if _PLACEHOLDER.search(path):
            continue
        if not exists(path):
            yield f"{path} is not there"
        elif anchor and path.endswith(".md") and anchor[1:] not in anchors(ROOT / path):
            yield f"{path} has no {anchor}"
    for page in _ELSEWHERE if name.endswith(".md") else _ELSEWHERE + _IN_SHORT:
        if page in text and re.search(rf"(?<![\w/-]){re.escape(page)}", text):
            yield f"{page} is not in the repository"
    if "design, section" in text.lower():
        yield "there is no design with sections"
    for page, numbers in _SECTIONS.findall(text):
        missing = set(re.findall(r"\d+(?:\.\d+)?", numbers)) - sections(page)
        yield from (f"docs/internals/{page}.md has no section {number}" for number in sorted(missing))
    if name.endswith(".md"):
        yield from broken_links(name, text)
    if name.startswith(("tests/unit/cache/", "tests/model/cache/")):
        yield from broken_scenarios(text)


def broken_links(name: str, text: str) -> Iterator[str]:
    """The links of a Markdown page that lead nowhere."""
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = (ROOT / name).parent / target if target else ROOT / name
        if not place.exists():
            yield f"the link to {target} leads nowhere"
        elif anchor and place.suffix == ".md" and anchor not in anchors(place):
            yield f"{target or name} has no #{anchor}"


def broken_scenarios(text: str) -> Iterator[str]:
    """The scenarios that a test cites and nobody can find."""
    cited = {int(number) for numbers in _SCENARIOS.findall(text) for number in re.findall(r"\d+", numbers)}
    if cited and "docs/internals/cache.md" not in text:
        yield "scenarios are cited without a word where they are listed"
    yield from (f"docs/internals/cache.md has no scenario {number}" for number in sorted(cited - scenarios()))
    yield from (f"a bare number: {line.strip()}" for line in text.splitlines() if _BARE_NUMBER.search(line))


def test_what_is_cited_is_there() -> None:
    named = texts()
    assert len(named) > 500
    assert [f"{name}: {complaint}" for name in named for complaint in broken(name, text_of(name))] == []


def test_the_map_shows_the_layers_that_are_checked() -> None:
    _, _, table = text_of("docs/architecture.md").partition("| from top to bottom |")
    rows = re.findall(r"^\| (`.*?`) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == list(LAYERS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("see docs/nowhere.md", "docs/nowhere.md is not there"),
        ("see docs/operating.md#memorie", "docs/operating.md has no #memorie"),
        ("(store.md, 2.4)", "store.md is not in the repository"),
        ("docs/internals/wire.md, 2.4 and 99.1", "docs/internals/wire.md has no section 99.1"),
        ("(design, section 2)", "there is no design with sections"),
    ],
)
def test_a_citation_that_leads_nowhere_is_found(text: str, complaint: str) -> None:
    assert list(broken("some.py", text)) == [complaint]
