"""The build of the libraries: each fits today's MLX, or is gone, with the reason in its place."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from setuptools import Distribution, Extension

from runner.cpu import extensions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs the libraries")
Builds = Callable[..., dict[str, str]]


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Builds a library `p.k` from a line of C where a former build left two, and returns what is there then."""
    (tmp_path / "p").mkdir()
    monkeypatch.chdir(tmp_path)

    def built(code: str, *libraries: str, inplace: bool = False) -> dict[str, str]:
        place = tmp_path / ("" if inplace else "lib") / "p"
        place.mkdir(parents=True, exist_ok=True)
        for left in ("k.so", "k.cpython-39.so", "k.missing"):
            (place / left).write_text("left")
        Path("k.c").write_text(code)
        extension = Extension("p.k", ["k.c"], libraries=[*libraries], optional=True)
        command = extensions.BuildExtensions(Distribution({"packages": ["p"], "ext_modules": [extension]}))
        command.build_lib, command.build_temp, command.inplace = "lib", "temp", inplace
        command.ensure_finalized()
        command.run()
        found = [path for path in place.iterdir() if path.name.startswith("k.")]
        return {path.name: path.read_text() if path.suffix == ".missing" else "" for path in found}

    return built


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_built_replaces_what_former_builds_left(builds: Builds, *, inplace: bool) -> None:
    assert builds("int k;", inplace=inplace) == {"k.so": ""}


@pytest.mark.parametrize("inplace", [False, True])
def test_the_compilers_first_error_is_kept_in_place_of_the_library(
    builds: Builds, capfd: pytest.CaptureFixture[str], *, inplace: bool
) -> None:
    kept = builds("#error one\n#error two", inplace=inplace)
    wanted = "the compiler failed: k.c:1:2: error: #error one\n"
    assert kept == {"k.missing": wanted}
    assert "#error two" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["CC", "LDSHARED"])
def test_a_missing_compiler_is_named_with_the_command_that_installs_one(
    builds: Builds, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(command, "nothing-cc")
    kept = builds("int k;")["k.missing"]
    assert re.fullmatch(r"the installation found no nothing-cc( \(`sudo \S+ \S+ (g\+\+|gcc-c\+\+|gcc)`\))?\n", kept)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('#!/bin/sh\ncc "$@"\ncase $* in *-shared*) kill -9 $$ ;; esac\n', "the compiler failed: exit status -9"),
        ("no program", "{} does not run: Exec format error"),
    ],
    ids=["a killed linker", "no program"],
)
def test_a_program_that_fails_leaves_a_reason_and_no_part_of_a_library(
    builds: Builds, program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(program)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert builds("int k;") == {"k.missing": f"{reason.format(compiler)}\n"}


def test_a_missing_mlx_is_no_fault_of_the_compiler(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "find_spec", lambda _: None)
    assert builds("int k;", "mlx") == {"k.missing": "the installation found no MLX for CPUs\n"}


def test_the_wheel_serves_every_python() -> None:
    wheel = extensions.Wheel(Distribution({"ext_modules": [Extension("p.k", ["k.c"])]}))
    wheel.ensure_finalized()
    assert wheel.get_tag()[:2] == ("py3", "none")
    assert wheel.get_tag()[2].startswith("linux_")
