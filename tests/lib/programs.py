"""Programs in Python that a test runs to their end."""

import subprocess
import sys
from typing import Any


def python(*words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs Python with these words, for a minute at most. Returns its status and its outputs, as text."""
    usual: dict[str, Any] = {"text": True, "timeout": 60, "check": False}
    outputs = {} if options.keys() & {"stdout", "stderr"} else {"capture_output": True}
    return subprocess.run([sys.executable, *words], **usual | outputs | options)
