"""The versions of the packages that this runner computes with: the installed ones and the needed ones.

Only commands and failed starts ask for them: to look for one package takes longer than to import all modules of this
runner.
"""

import operator
import re
import sys
from pathlib import Path

NEEDED = {"mlx": "==0.32.4", "mlx-lm": ">=0.32.2,<0.33"}
"""The versions that pyproject.toml asks for."""
_COMPARED = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}
_NAME = "ollama-mlx-runner"


def installed(package: str) -> str:
    """Returns the version of a package; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) or "of an unknown version"
    except PackageNotFoundError:
        return ""


def misfits() -> str:
    """Returns the packages whose versions are not those needed; empty if all fit."""
    found = {package: installed(package) for package in NEEDED}
    return "; ".join(
        f"found {f'{package} {version}' if version else f'no {package}'}, want {package}{NEEDED[package]}"
        for package, version in found.items()
        if not _fits(version, NEEDED[package])
    )


def remedy() -> str:
    """Returns the advice for an installation without MLX, or with another version of it."""
    cuda = ", with [cuda] in place of [cpu] for an NVIDIA GPU" if sys.platform == "linux" else ""
    return f"run `{install_command()}`{cuda}"


def install_command() -> str:
    """Returns the command that installs this package again, with MLX for CPUs, the way it was installed."""
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote

    try:
        package = distribution(_NAME)
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        by_uv = (package.read_text("INSTALLER") or "").strip() == "uv"
    except PackageNotFoundError:  # a checkout
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
    again = [] if words[-1].startswith("/") else ["--force-reinstall"]  # which pip needs for the same version
    return shlex.join([sys.executable, "-m", "pip", "install", *again, *words])


def _fits(version: str, wanted: str) -> bool:
    bounds = re.findall(r"([<=>]+)([\d.]+)", wanted)
    return all(_COMPARED[operation](_key(version), _key(bound)) for operation, bound in bounds)


def _key(version: str) -> tuple[int, ...]:
    """Returns the numbers with which a version begins, without those of a local build or a preview."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))
