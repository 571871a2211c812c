"""The locked requirements: complete on every platform, with hashes, and without known vulnerabilities."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT

LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
INCLUDES = {"core": [], "dev": ["cpu.lock"], **{name: ["core.lock"] for name in EXTRAS if name != "dev"}, "vlm": []}
"""`vlm` is installed after core, without what its packages need: its lock has all that is imported."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
ELSEWHERE = re.compile(r"mlx-metal|mlx-cuda-.*|nvidia-.*|colorama|httpx2-jsfetch")
"""Never installed with a Linux CPU's set-up: what they need themselves, `scripts/lock` looks at."""


class Locked(NamedTuple):
    """A line of a lock."""

    requirement: Requirement
    hashes: list[str]


class Need(NamedTuple):
    """Something that must be locked, and what for."""

    requirement: Requirement
    by: str


Lock = Mapping[str, Locked]


def lock_of(name: str) -> dict[str, Locked]:
    """By canonical name, what `-r requirements/NAME.lock` may install."""
    text = (LOCKS / f"{name}.lock").read_text()
    found: dict[str, Locked] = {}
    for include in re.findall(r"^-r (.*)\.lock$", text, re.MULTILINE):
        found |= lock_of(include)
    for line in re.sub(r" \\\n +", " ", text).splitlines():
        if line and not line.startswith((" ", "#", "-")):
            words, *hashes = line.split(" --hash=")
            requirement = Requirement(words)
            assert requirement.name not in found, "locked twice"
            found[canonicalize_name(requirement.name)] = Locked(requirement, hashes)
    return found


def _environment(python: str, sys_platform: str, system: str, machine: str) -> dict[str, str]:
    """Returns the variables that markers refer to."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": system,
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": sys_platform,
    }


ENVIRONMENTS = {
    f"Python {python}, {platform[1]} {platform[2]}": _environment(python, *platform)
    for python in PYTHONS
    for platform in PLATFORMS
}


def holds(marker: Marker | None, environment: str, extra: str = "") -> bool:
    return marker is None or marker.evaluate({**ENVIRONMENTS[environment], "extra": extra})


def missing(lock: Lock, wanted: list[str], environment: str) -> Iterator[str]:
    """Yields direct and indirect dependencies of these requirements that the lock lacks in this environment."""
    todo = [Need(Requirement(words), "pyproject.toml") for words in wanted]
    seen = set()
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.requirement.name)
        if not holds(need.requirement.marker, environment):
            continue
        locked = lock.get(name)
        if locked is None or not holds(locked.requirement.marker, environment):
            yield f"{name}, for {need.by}"
            continue
        (pin,) = locked.requirement.specifier
        if not need.requirement.specifier.contains(pin.version):
            yield f"{need.requirement}, for {need.by}: locked is {pin.version}"
        for extra in {"", *need.requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += needs_of(name, extra, environment)


@cache
def needs_of(name: str, extra: str, environment: str) -> list[Need]:
    """Returns the requirements that an installed package declares for this extra and environment."""
    return [
        Need(Requirement(str(requirement).split(";")[0]), name)
        for requirement in metadata_of(name)
        if holds(requirement.marker, environment, extra)
    ]


@cache
def metadata_of(name: str) -> list[Requirement]:
    try:
        return [Requirement(words) for words in requires(name) or []]
    except PackageNotFoundError:
        assert ELSEWHERE.fullmatch(name) or name not in lock_of("dev"), (
            f"{name} is not installed: run scripts/environment"
        )
        return []


def wanted_of(name: str) -> list[str]:
    """Returns the requirements in pyproject.toml that belong into requirements/NAME.lock."""
    project: dict[str, list[str]] = PROJECT["project"]
    tools = (words for words in PROJECT["build-system"]["requires"] if not words.startswith("mlx"))
    wanted = [*tools, *project["dependencies"], *EXTRAS.get(name, [])]
    return [*wanted, *EXTRAS["cpu"]] if name == "dev" else wanted


def everything_missing(lock: Lock, name: str) -> set[str]:
    return {text for environment in ENVIRONMENTS for text in missing(lock, wanted_of(name), environment)}


@pytest.mark.parametrize("name", INCLUDES)
def test_everything_that_is_needed_anywhere_is_locked(name: str) -> None:
    assert not everything_missing(lock_of("core") | lock_of(name), name), "run: scripts/lock"


def test_kernels_are_compiled_against_the_mlx_that_serves_them() -> None:
    """Extras leave the version to the dependencies."""
    (serves,) = (each for each in map(Requirement, PROJECT["project"]["dependencies"]) if each.name == "mlx")
    (built,) = (each for each in map(Requirement, PROJECT["build-system"]["requires"]) if each.name == "mlx-cpu")
    assert [pin.operator for pin in serves.specifier] == ["=="]
    assert serves.specifier == built.specifier == lock_of("cpu")["mlx-cpu"].requirement.specifier
    assert serves.specifier == lock_of("core")["mlx"].requirement.specifier
    backends = [each for name in ("cpu", "cuda") for each in map(Requirement, EXTRAS[name]) if each.name == "mlx"]
    assert [str(each) for each in backends] == [
        f'mlx[{backend}]; sys_platform == "linux"' for backend in ("cpu", "cuda13")
    ]


def test_cuda_and_metal_are_locked() -> None:
    (mlx,) = lock_of("core")["mlx"].requirement.specifier
    assert f"mlx-metal{mlx}" == str(lock_of("core")["mlx-metal"].requirement).split(";")[0]
    assert f"mlx-cuda-13{mlx}" == str(lock_of("cuda")["mlx-cuda-13"].requirement).split(";")[0]
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= set(lock_of("cuda"))
    assert not {"mlx-cpu"} & set(lock_of("cuda")), "the two have files of the same name"


@pytest.mark.parametrize("name", INCLUDES)
def test_every_package_has_one_version_and_hashes_and_is_a_wheel(name: str) -> None:
    text = (LOCKS / f"{name}.lock").read_text()
    assert re.findall(r"^-.*$", text, re.MULTILINE) == [
        *(f"-r {include}" for include in INCLUDES[name]),
        "--only-binary :all:",  # what a source package builds with is not locked
    ]
    for package, (requirement, hashes) in lock_of(name).items():
        assert [pin.operator for pin in requirement.specifier] == ["=="], package
        assert hashes, package
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", text) for text in hashes), package
    assert "://" not in text


@pytest.mark.parametrize(
    ("package", "hole"),
    [
        ("aiohttp", "3.14.2"),  # CVE-2026-69244; before: -69243, request smuggling
        ("jinja2", "3.1.5"),  # CVE-2025-27516, out of the sandbox
        ("protobuf", "6.33.4"),  # CVE-2026-0994
        ("sentencepiece", "0.2.0"),  # CVE-2026-1260
        ("setuptools", "78.1.0"),  # CVE-2025-47273
        ("transformers", "5.9.0"),  # CVE-2026-9856, of the save_pretrained that the README tells of
    ],
)
def test_no_range_takes_a_version_with_a_known_hole(package: str, hole: str) -> None:
    (wanted,) = (words for words in map(Requirement, wanted_of("core")) if words.name == package)
    assert not wanted.specifier.contains(hole)
