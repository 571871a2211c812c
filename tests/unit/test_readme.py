"""What the README says is what the program does."""

import re
import subprocess
import sys

from runner.cli.flags import CHECK_FLAGS, FLAGS, TOP_FLAGS
from scripts.tools.docs.generate import README, with_parts


def test_the_flags_and_the_architectures_are_todays() -> None:
    text = README.read_text()
    assert text == with_parts(text), "run: python -m scripts.tools.docs.generate"


def options_of(module: str, *words: str) -> set[str]:
    """What its --help lists, behind these words."""
    command = [sys.executable, "-m", module, *words, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^ +(?:-h, )?--([a-z-]+)", shown, re.MULTILINE))


def test_help_names_every_flag_and_nothing_else() -> None:
    assert options_of("runner") == {flag.name for flag in FLAGS} | {"help", "version"}


def test_the_readme_names_no_flag_that_does_not_exist() -> None:
    known = {flag.name for flag in (*FLAGS, *CHECK_FLAGS, *TOP_FLAGS)} | {"help", "version"}
    known |= {"all", "python", "mlx-engine", "experimental"}  # of scripts/test, of hosts, of `ollama create`
    known |= {"require-hashes", "no-deps", "no-build-isolation"}  # of pip
    for script in ("demo", "host", "conformance", "soak"):
        known |= options_of(f"scripts.tools.{script}.main")
    known |= options_of("scripts.tools.bench", "decode")
    for path in (README, README.parent / "docs" / "operating.md"):
        text = re.sub(r"curl [^\n]*", "", path.read_text())
        assert set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text)) <= known
