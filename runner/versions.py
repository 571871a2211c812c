"""The versions of the packages that this runner computes with: those installed, and those that it needs.

Asked only after something has failed, or by commands: looking for a package takes longer than the rest of a start's
imports of ours.
"""

import re

NEEDED = {"mlx": ("0.32.4", "0.33"), "mlx-lm": ("0.32.2", "0.33")}
"""The first version, and the first that is too new, as in pyproject.toml."""
INSTALL = "install requirements/cpu.lock or, for NVIDIA, requirements/cuda.lock"


def installed(package: str) -> str:
    """Returns the version of a package; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) or "of an unknown version"
    except PackageNotFoundError:
        return ""


def misfits() -> str:
    """Returns which packages have other versions than those needed; empty if all fit."""
    found = {package: installed(package) for package in NEEDED}
    return "; ".join(
        f"found {f'{package} {version}' if version else f'no {package}'}, want {package}>={least},<{beyond}"
        for package, version in found.items()
        for least, beyond in (NEEDED[package],)
        if not _key(least) <= _key(version) < _key(beyond)
    )


def _key(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with; those of a local build or a preview do not count."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))
