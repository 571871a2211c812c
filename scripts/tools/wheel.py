"""Builds the sdist, builds the wheel from it, and tries the wheel in an empty virtual environment.

The wheel serves every Python of this platform. Nothing is downloaded for the Python that runs this: setuptools and MLX
come from its environment, and so do the run-time dependencies, through a .pth file in the empty environment.
tests/unit/test_requirements.py checks that they are all declared. For other Pythons they are installed from
requirements/cpu.lock.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runner import cpu
from scripts.tools import ROOT
from scripts.tools.demo.questions import CONVERSATIONS
from scripts.tools.host.lib import LoadError, Process, free_port

MODEL = ROOT / "scripts" / "demo_model"
_PACKAGES = ("protocol", "runner")
_NOT_INSTALLED = re.compile(r".*\.(c|cpp|h|map|so|missing)|.*/__pycache__/.*")
"""The sources of the extensions and what is built from them."""
_COMMAND_TIMEOUT_S = 1800.0
"""The limit for one command, of which the compiler takes minutes on a busy machine."""
_TIMEOUT_S = 120.0


class WheelError(Exception):
    """The wheel or the sdist is not as it must be."""


def copy_sources(target: Path) -> None:
    """Copies the files that git tracks or would track, so that no left-over of a build gets into the next one."""
    listed = _output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def build_sdist(sources: Path, target: Path) -> Path:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _output([sys.executable, "-c", code, str(target)], sources)
    (sdist,) = target.glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, place: Path) -> Path:
    """Returns the wheel, built from the unpacked sdist alone."""
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (sources,) = (place / "unpacked").iterdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps"]
    _output([*pip, "--no-build-isolation", "--wheel-dir", str(place), str(sources)], place)
    (wheel,) = place.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Raises WheelError unless the wheel holds every file of the packages, and no other packages."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        for extension in ("_shim", "_kernels") if sys.platform == "linux" and shutil.which("c++") else ():
            if f"runner/cpu/{extension}.so" not in names:
                reason = archive.read(f"runner/cpu/{extension}.missing").decode().strip()
                raise WheelError(f"the extension runner.cpu.{extension} was not built: {reason}")
    wanted = {
        str(path.relative_to(ROOT))
        for package in _PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not _NOT_INSTALLED.fullmatch(str(path.relative_to(ROOT)))
    }
    if missing := wanted - names:
        raise WheelError(f"missing from the wheel: {', '.join(sorted(missing))}")
    foreign = {name for name in names if name.split("/")[0] not in _PACKAGES and ".dist-info/" not in name}
    if foreign:
        raise WheelError(f"does not belong into the wheel: {', '.join(sorted(foreign))}")


def install(wheel: Path, environment: Path) -> Path:
    """Makes an empty virtual environment of this Python with the wheel in it. Returns the path of `mlx-runner`."""
    _output([sys.executable, "-m", "venv", "--without-pip", str(environment)], environment.parent)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(environment / "bin" / "python")]
    _output([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], environment.parent)
    (packages,) = environment.glob("lib/python*/site-packages")
    # The paths in a .pth file add packages, but no .pth files: that of the checkout, beside them, has no effect.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return environment / "bin" / "mlx-runner"


def install_on(python: str, wheel: Path, environment: Path) -> Path:
    """Does the same for another Python, which gets dependencies of its own from the package index."""
    _output([python, "-m", "venv", str(environment)], environment.parent)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for words in (["--require-hashes", "-r", str(ROOT / "requirements" / "cpu.lock")], ["--no-deps", str(wheel)]):
        _output([*pip, *words], environment.parent, os.environ)
    return environment / "bin" / "mlx-runner"


def try_commands(program: Path, place: Path) -> Iterator[str]:
    """Runs every command outside the checkout, and yields a line for each. Raises WheelError if one fails."""
    python = str(program.with_name("python"))
    code = "import runner, protocol; print(runner.__file__); print(protocol.__file__)"
    for path in _output([python, "-c", code], place).split():
        if not Path(path).is_relative_to(program.parents[1]):
            raise WheelError(f"imported from {path}, not from the wheel")
    yield _output([str(program), "--version"], place).strip()
    for words in (["--help"], ["check", "--help"], ["top", "--help"], ["ollama", "serve", "--help"]):
        _expect("usage: mlx-runner", _output([str(program), *words], place), " ".join(words))
        yield f"mlx-runner {' '.join(words)}"
    _expect("complete ", _output([str(program), "completion", "bash"], place), "completion bash")
    yield "mlx-runner completion bash"
    checked = _output([str(program), "check", str(MODEL)], place)
    _expect("would load", checked, "check")
    _expect(kernels := f"kernels       {cpu.find_kernels().name}", checked, "check")
    yield f"mlx-runner check scripts/demo_model: {kernels}"
    code = "from runner.ollama.plan import own_command; print(*own_command(), sep='\\n')"
    own = _output([python, "-c", code], place).splitlines()
    _expect("mlx-runner ", _output([*own, "--version"], place), " ".join(own))
    yield f"what `mlx-runner ollama serve` starts: {' '.join(own[1:])}"


def try_server(program: Path, place: Path) -> Iterator[str]:
    """Serves the demo model and yields a line for each thing that works. Raises WheelError if one does not."""
    port = free_port()
    argv = [str(program), "--model", str(MODEL), "--port", str(port)]
    with Process(argv, port, environment=_environ(place), cwd=place) as process:
        process.wait_ready(_TIMEOUT_S)
        url = f"http://127.0.0.1:{port}"
        body = {"Prompt": CONVERSATIONS[0].prompt(0), "Options": {"temperature": 0.0, "num_predict": 50}}
        lines = [json.loads(line) for line in _fetch(f"{url}/completion", body).splitlines()]
        _expect(CONVERSATIONS[0].turns[0].answer, "".join(line.get("Content", "") for line in lines), "the answer")
        yield "a completion"
        for path, wanted in (
            ("/", "<!doctype html>"),
            ("/page/main.js", "import"),
            ("/metrics", "mlx_runner_requests"),
        ):
            _expect(wanted, _fetch(url + path).lower(), path)
            yield path
        _expect("1 answered", _output([str(program), "top", "--once", url], place), "top")
        yield "mlx-runner top --once"


def _fetch(url: str, body: Mapping[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())


def _expect(wanted: str, text: str, where: str) -> None:
    if wanted not in text:
        raise WheelError(f"{where}: {wanted!r} is missing from {text!r}")


def _environ(home: Path) -> dict[str, str]:
    """Returns an environment that leads to nothing of the checkout, nor of the user."""
    return {"PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8"}


def _output(command: Sequence[str], cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    environ, limit_s = environ or {**_environ(cwd), "PATH": os.environ["PATH"]}, _COMMAND_TIMEOUT_S
    try:
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"{' '.join(command)}: ended after {limit_s:.0f} s; is the machine busy?") from error
    except OSError as error:
        raise WheelError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise WheelError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/wheel", description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the sdist and the wheel to this directory")
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="PATH", help="try it with these Pythons, too; needs the network"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        place = Path(name)
        elsewhere, sources = place / "elsewhere", place / "sources"
        elsewhere.mkdir()
        try:
            copy_sources(sources)
            sdist = build_sdist(sources, place)
            wheel = build_wheel(sdist, place)
            check_contents(wheel)
            print(
                f"built: {sdist.name} {sdist.stat().st_size >> 10} KiB, {wheel.name} {wheel.stat().st_size >> 10} KiB"
            )
            for number, python in enumerate([sys.executable, *arguments.python]):
                environment = place / f"empty{number}"
                program = install_on(python, wheel, environment) if number else install(wheel, environment)
                print(_output([python, "--version"], place).strip())
                for line in (*try_commands(program, elsewhere), *try_server(program, elsewhere)):
                    print(f"  works: {line}", flush=True)
        except (WheelError, LoadError) as error:
            sys.exit(f"scripts/wheel: {error}")
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                shutil.copy(path, arguments.keep)


if __name__ == "__main__":
    main()
