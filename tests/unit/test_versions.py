"""The versions that a refusal names are those of pyproject.toml; the command that it names is the user's own."""

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from runner import versions
from tests import ROOT


def test_what_is_needed_is_what_the_project_asks_for() -> None:
    asked = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert {each.name: each.specifier for each in asked if each.name in versions.NEEDED} == {
        name: SpecifierSet(wanted) for name, wanted in versions.NEEDED.items()
    }
    assert versions.misfits() == "", "those of this environment fit"


@pytest.mark.parametrize(
    ("package", "version", "fits"),
    [
        ("mlx", "0.32.4", True),
        ("mlx", "0.32.4.dev20261101+abc9", True),
        ("mlx", "0.32.5", False),
        ("mlx", "0.32.3", False),
        ("mlx", "", False),
        ("mlx-lm", "0.32.2", True),
        ("mlx-lm", "0.32.10", True),
        ("mlx-lm", "0.9", False),
        ("mlx-lm", "0.33", False),
        ("mlx-lm", "1", False),
    ],
)
def test_a_version_fits_by_its_numbers(package: str, version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", {"mlx": "0.32.4", "mlx-lm": "0.32.2", package: version}.get)
    told = f"found {f'{package} {version}' if version else f'no {package}'}, want {package}{versions.NEEDED[package]}"
    assert versions.misfits() == ("" if fits else told)


FOLDER = {"url": "file:///home/a%20b/runner", "dir_info": {}}
EXTRA = "[cpu]" if sys.platform == "linux" else ""
PIP = f"{sys.executable} -m pip install"


@pytest.mark.parametrize(
    ("origin", "installer", "receipt", "wanted"),
    [
        (FOLDER, "pip", "", f"{PIP} '/home/a b/runner{EXTRA}'"),
        ({**FOLDER, "dir_info": {"editable": True}}, "pip", "", f"{PIP} -e '/home/a b/runner{EXTRA}'"),
        (FOLDER, "uv", "uv-receipt.toml", f"uv tool install '/home/a b/runner{EXTRA}'"),
        (FOLDER, "pip", "pipx_metadata.json", f"pipx install --force '/home/a b/runner{EXTRA}'"),
        (
            *(FOLDER, "uv", ""),
            f"uv pip install --python {sys.executable} --reinstall-package ollama-mlx-runner '/home/a b/runner{EXTRA}'",
        ),
        (
            *({"url": "https://a.b/c.git", "vcs_info": {"vcs": "git"}}, "pip", ""),
            f"{PIP} --force-reinstall 'ollama-mlx-runner{EXTRA} @ git+https://a.b/c.git'",
        ),
        (
            *({"url": "https://a.b/c.git", "vcs_info": {"vcs": "git", "requested_revision": "v1"}}, "pip", ""),
            f"{PIP} --force-reinstall 'ollama-mlx-runner{EXTRA} @ git+https://a.b/c.git@v1'",
        ),
        (None, "pip", "", f"{PIP} --force-reinstall 'ollama-mlx-runner{EXTRA}'"),
    ],
    ids=["pip", "editable", "uv tool", "pipx", "uv pip", "git", "tag", "index"],
)
def test_the_command_is_that_of_the_installation(
    *, origin: object, installer: str, receipt: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"direct_url.json": origin and json.dumps(origin), "INSTALLER": f"{installer}\n"}
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: SimpleNamespace(read_text=texts.get))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if receipt:
        (tmp_path / receipt).touch()
    assert versions.install_command() == wanted


@pytest.mark.parametrize(
    "record", ["{", "[" * 100_000, "[]", '{"url": 3, "dir_info": 3}', '{"vcs_info": {"vcs": "git"}}', b"\xff"], ids=len
)
def test_damaged_records_leave_a_command(record: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(_: str) -> str:
        return record if isinstance(record, str) else record.decode()

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: SimpleNamespace(read_text=read_text))
    assert versions.install_command() == f"{PIP} --force-reinstall 'ollama-mlx-runner{EXTRA}'"


def test_a_checkout_installs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_NAME", "missing")
    assert versions.install_command().endswith(f"-m pip install '{ROOT}{EXTRA}'")
