"""The versions that a refusal names are those of pyproject.toml."""

import tomllib

import pytest
from packaging.requirements import Requirement

from runner import versions
from tests import ROOT


def test_what_is_needed_is_what_the_project_asks_for() -> None:
    asked = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert {each.name: str(each.specifier) for each in asked if each.name in versions.NEEDED} == {
        name: f"<{beyond},>={least}" for name, (least, beyond) in versions.NEEDED.items()
    }
    assert versions.misfits() == "", "those of this environment fit"


@pytest.mark.parametrize(
    ("mlx", "fits"),
    [
        ("0.32.4", True),
        ("0.32.10", True),
        ("0.32.4.dev20261101+abc9", True),
        ("0.32.3", False),
        ("0.9", False),
        ("0.33", False),
        ("1", False),
        ("", False),
    ],
)
def test_a_version_fits_by_its_numbers(mlx: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", {"mlx": mlx, "mlx-lm": versions.NEEDED["mlx-lm"][0]}.get)
    least, beyond = versions.NEEDED["mlx"]
    told = f"found {f'mlx {mlx}' if mlx else 'no mlx'}, want mlx>={least},<{beyond}"
    assert versions.misfits() == ("" if fits else told)
