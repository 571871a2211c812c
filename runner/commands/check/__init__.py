"""`mlx-runner check`: reports the facts of a model, and every problem that would prevent serving it."""

import os
import sys
from typing import NoReturn

from runner import cpu
from runner.errors import RunnerError, no_mlx
from runner.logs import Log
from runner.settings import CheckSettings

log = Log(__name__)
_STDOUT = 1


def check(settings: CheckSettings) -> NoReturn:
    """Prints the report and ends the process. The status is 1 if the model would not load, or a wing found a fault."""
    if settings.verify:
        preloaded = cpu.preload(settings.blas, settings.blas_threads, settings.kernels)
        log.debug("trying the model", **preloaded._asdict())
    try:
        from runner.commands.check.inspection import inspect
    except ImportError as error:
        raise no_mlx(error) from error
    from runner.commands.check.report_text import as_json, as_text

    found = inspect(settings)
    text = as_json(found) if settings.json else as_text(found)
    data = text.encode(sys.stdout.encoding if sys.stdout else "utf-8", "backslashreplace")
    try:
        while data:
            data = data[os.write(_STDOUT, data) :]
    except BrokenPipeError:
        pass  # the reader has closed the pipe, as `head` does
    except OSError as error:
        raise RunnerError(f"write to standard output: {(error.strerror or str(error)).lower()}") from error
    faults = [facts for facts in (found.format, found.embeddings) if facts is not None and facts.is_fault]
    sys.exit(0 if found.loads and not faults else 1)
