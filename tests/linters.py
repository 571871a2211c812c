"""Runs the linters beside the tests: `--lint` starts them, and one that fails fails the run."""

import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO

import pytest

COMMANDS = (("ruff", "format", "--check", "."), ("ruff", "check", "--quiet", "."), ("mypy",))
WORTH_WAITING = frozenset((pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED))
"""The exit statuses after which the run waits for the linters; any other ends them."""


class Linters:
    """The plugin of the process that writes the summary. It waits for its children, so that their time counts."""

    def __init__(self) -> None:
        self._running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []
        for command in COMMANDS:
            output = tempfile.TemporaryFile()  # noqa: SIM115  # read when the tests have ended
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            self._running.append((" ".join(command), process, output))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        """Writes what the linters found after the summary of the tests, where nothing hides it."""
        yield
        if exitstatus not in WORTH_WAITING:
            return
        terminal = session.config.get_terminal_writer()
        for command, process, output in self._running:
            if process.wait():
                output.seek(0)
                terminal.sep("=", f"{command} failed", red=True)
                terminal.write(output.read().decode())
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        """Ends the linters that nobody waited for, in a run that was interrupted or refused."""
        for _, process, output in self._running:
            process.kill()
            process.wait()
            output.close()
