"""The page's files: who may read them, and what they must never contain. tests/process/page runs them in a browser."""

import re
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.server.script import Client

FOLDER = ROOT / "runner" / "numbers" / "page"
FILES = sorted(FOLDER.iterdir())
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\(|Function\("
)
"""Calls that would interpret text as markup or as a program."""
SVG = "http://www.w3.org/2000/svg"
"""A name, not an address."""


async def test_the_page_may_load_its_own_files_and_nothing_else(client: Client) -> None:
    reply = await client.get("/")
    assert (reply.status, reply.content_type) == (200, "text/html")
    policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["Content-Security-Policy"].split(";"))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert {"base-uri", "form-action", "frame-ancestors"} <= policy.keys(), "those have no default"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Cache-Control"] == "no-store"


async def test_every_file_is_served_with_its_type(client: Client) -> None:
    types = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert len(FILES) > 3
    for path in FILES:
        reply = await client.get(f"/page/{path.name}")
        assert (reply.status, reply.content_type) == (200, types[path.suffix])
        assert await reply.read() == path.read_bytes()
        assert "Content-Security-Policy" in reply.headers


@pytest.mark.parametrize("name", ["..%2Fpage.py", "%2e%2e%2fapp.py", "nothing.js", "%00"])
async def test_no_other_file_is_served(name: str, client: Client) -> None:
    reply = await client.get(f"/page/{name}")
    assert reply.status == 404
    assert await reply.text() == "404 page not found\n"


async def test_only_get_and_head_are_answered(client: Client) -> None:
    assert (await client.head("/")).status == 200
    assert (await client.post("/")).status == 405


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_place_or_takes_text_for_markup(path: Path) -> None:
    text = path.read_text().replace(SVG, "")
    assert not re.search(r"https?://|//[a-z]", text, re.IGNORECASE)
    assert not MARKUP.search(text)
    assert len(text.splitlines()) <= 250
    if path.suffix == ".html":
        assert not re.search(r"<style|\bstyle=|\bon[a-z]+=|<script(?! type=\"module\" src=)", text)


def test_the_files_are_part_of_what_is_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in patterns["runner.numbers"] for path in FOLDER.parent.glob(pattern)}
    assert packed >= set(FILES)
