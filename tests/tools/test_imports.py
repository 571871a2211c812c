"""Imports of the tools in scripts/: run-time dependencies only where users run them, and no circles."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests import ROOT

FOR_USERS = ("demo", "host", "conformance", "soak")
FURTHER = (
    *("conformance.faulty", "host.template_worker", "real.main"),
    *("device.__main__", "device.installed", "device.checks", "device.compiled", "device.served"),
)
"""Further modules that users run, or that tools spawn."""
OURS = ("protocol", "runner", "scripts")


def modules() -> dict[str, Path]:
    """Returns the modules of this repository that tools may import, by name."""
    found = {}
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imports(name: str) -> frozenset[str]:
    """Returns the modules that a module imports, anywhere in it; `from package import module` names the module."""
    return frozenset(imported(name))


def imported(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in MODULES else node.module or ""


def reached(name: str) -> set[str]:
    """Returns all modules that a module imports, directly or through others of this repository."""
    found, waiting = set[str](), [name]
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        packages = {".".join(parts[:length]) for length in range(1, len(parts) + 1)} - found
        found |= packages
        for package in packages & set(MODULES):
            waiting += imports(package)
    return found


def packages_for_developers() -> set[str]:
    """Returns the names by which the packages of the extras dev and browser are imported."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = [word for extra in ("dev", "browser") for word in extras[extra] if word not in extras["sound"]]
    names = {word.partition(">")[0].lower() for word in words}
    imported = {
        module
        for module, packages in packages_distributions().items()
        if any(package.lower() in names for package in packages)
    }
    return imported | {name.replace("-", "_") for name in names}


@pytest.mark.parametrize("tool", FOR_USERS)
def test_tools_for_users_need_no_package_for_developers(tool: str) -> None:
    found = {module.partition(".")[0] for module in reached(f"scripts.tools.{tool}.main")}
    assert {"scripts", "asyncio", "aiohttp"} <= found, "the graph is followed"
    assert not found & packages_for_developers()
    assert "tests" not in found


@pytest.mark.parametrize("module", FURTHER)
def test_neither_do_further_modules_that_users_run(module: str) -> None:
    assert not {name.partition(".")[0] for name in reached(f"scripts.tools.{module}")} & packages_for_developers()


HOST = "scripts.tools.host.lib"


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith(HOST)))
def test_the_library_of_the_host_stands_alone(module: str) -> None:
    """Any runner can be tried with it; nothing of this repository's runner is needed."""
    outside = {name for name in imports(module) if not name.startswith(HOST)}
    assert {name.partition(".")[0] for name in outside} <= {*sys.stdlib_module_names, "aiohttp"}
