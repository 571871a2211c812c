"""The costs of a start, in counts: modules, interpreters, runs of the garbage collector."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import free_port, write_decoys
from tests import ROOT
from tests.process.conftest import RANDOM

WATCHED = (sys.executable, str(Path(__file__).parent / "watched.py"))
NEVER = (
    *("aiohttp.client", "aiohttp.client_reqrep", "aiohttp.connector", "aiohttp.cookiejar", "aiohttp.tracing"),
    *("aiohttp.formdata", "aiohttp.http_websocket", "aiohttp.multipart", "aiohttp.web_fileresponse", "aiohttp.web_ws"),
    *("attr", "email", "http.client", "ssl", "urllib.request", "aiohappyeyeballs", "prometheus_client", "rich"),
    *("transformers", "huggingface_hub", "jinja2", "numpy", "safetensors", "sentencepiece", "yaml"),
    *("mlx_lm.generate", "mlx_lm.utils", "mlx_lm.tokenizer_utils"),
    *("importlib.metadata", "multiprocessing", "unittest", "pytest", "runner.numbers.metrics"),
)
"""Modules that the server never uses. Importing one takes a large part of the time of a start."""


class Watched(NamedTuple):
    """The report of `watched.py`."""

    before: list[str]
    ready: list[str]
    first: list[str]
    collections: int
    frozen: int
    collecting: bool


@pytest.fixture(scope="module")
def watched(models_dir: Path) -> Watched:
    environment = {**os.environ, "OLLAMA_MODELS": str(models_dir)}
    words = [*WATCHED, "--model", RANDOM, "--port", str(free_port()), "--log-level", "error"]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, timeout=120, check=True)
    return Watched(**json.loads(done.stdout))


def test_modules_that_a_server_never_uses_are_not_imported(watched: Watched) -> None:
    assert {"aiohttp.web", "mlx.core", "runner.engine.scheduler"} <= set(watched.ready)
    assert not {name for name in NEVER if name in watched.first}


def test_the_first_requests_import_nothing(watched: Watched) -> None:
    assert set(watched.first) - set(watched.ready) == set()


def test_objects_made_at_the_start_are_never_garbage_collected(watched: Watched) -> None:
    assert watched.collections <= 5, "some before the runner's first line"
    assert watched.frozen > 10_000
    assert watched.collecting, "what comes later is collected"


def test_with_a_hosts_libraries_on_the_path_the_process_restarts_once_and_early(tmp_path: Path) -> None:
    libraries = write_decoys(tmp_path / "lib" / "ollama")
    words = [RUNNER[0], "-X", "importtime", *RUNNER[1:], "--model", str(tmp_path / "nothing")]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    imported = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert imported.count("runner.process.parent") == 2, "one interpreter before the restart, one after it"
    assert imported.count("asyncio") == imported.count("runner.app") == imported.count("msgspec") == 1
