"""The versions of the packages with which this runner computes: the installed versions and the needed ones.

Only commands and failed starts call this module: finding one installed package takes longer than importing all modules
of this runner.
"""

import operator
import re
import sys
from pathlib import Path

NEEDED = {"mlx": "==0.32.4", "mlx-lm": ">=0.32.2,<0.33"}
"""The versions that pyproject.toml requires."""
_COMPARED = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}
_NAME = "ollama-mlx-runner"


def installed(package: str) -> str:
    """Returns the installed version of a package. Empty if the package is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) or "of an unknown version"
    except PackageNotFoundError:
        return ""


def misfits() -> str:
    """Returns a text about the packages whose installed version is not a needed one. Empty if all fit."""
    found = {package: installed(package) for package in NEEDED}
    return "; ".join(
        f"found {f'{package} {version}' if version else f'no {package}'}, want {package}{NEEDED[package]}"
        for package, version in found.items()
        if not _fits(version, NEEDED[package])
    )


def remedy() -> str:
    """Returns the advice for an installation that lacks MLX or has another version of MLX."""
    cuda = ", with [cuda] in place of [cpu] for an NVIDIA GPU" if sys.platform == "linux" else ""
    return f"run `{install_command()}`{cuda}"


def install_command() -> str:
    """Returns the command that installs this package again, with MLX for CPUs, by the same tool as before."""
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote

    try:
        package = distribution(_NAME)
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        by_uv = (package.read_text("INSTALLER") or "").strip() == "uv"
    except PackageNotFoundError:  # not installed: a checkout
        origin, by_uv = {"url": Path(__file__).parents[1].as_uri()}, False
    except (OSError, ValueError, RecursionError):  # damaged records
        origin, by_uv = {}, False
    extra = "[cpu]" if sys.platform == "linux" else ""
    match origin:
        case {"url": str(url), "vcs_info": {"vcs": str(vcs), "requested_revision": str(revision)}}:
            words = [f"{_NAME}{extra} @ {vcs}+{url}@{revision}"]
        case {"url": str(url), "vcs_info": {"vcs": str(vcs)}}:
            words = [f"{_NAME}{extra} @ {vcs}+{url}"]
        case {"url": str(url), **more} if url.startswith("file:"):
            source, folder = unquote(re.sub("^file:(//[^/]*)?", "", url)) + extra, more.get("dir_info")
            words = ["-e", source] if isinstance(folder, dict) and folder.get("editable") else [source]
        case _:
            words = [_NAME + extra]
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return shlex.join(["uv", "tool", "install", *words])
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "install", "--force", *words])
    if by_uv:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, "--reinstall-package", _NAME, *words])
    again = [] if words[-1].startswith("/") else ["--force-reinstall"]  # else pip does not replace the same version
    return shlex.join([sys.executable, "-m", "pip", "install", *again, *words])


def _fits(version: str, wanted: str) -> bool:
    bounds = re.findall(r"([<=>]+)([\d.]+)", wanted)
    return all(_COMPARED[operation](_key(version), _key(bound)) for operation, bound in bounds)


def _key(version: str) -> tuple[int, ...]:
    """Returns the numbers at the beginning of a version, without the numbers of a local build or a preview."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))
