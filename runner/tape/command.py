"""The command `mlx-runner replay`: computes a recording again, and compares the results."""

import sys
from typing import NoReturn

from runner import cpu
from runner.errors import no_mlx
from runner.logs import Log, printable
from runner.model import open_model
from runner.settings import ReplaySettings, context_limit
from runner.tape.file import TapeReader, check_identity
from runner.tokenizer import open_tokenizer
from runner.wings import chooser

log = Log(__name__)


def replay(settings: ReplaySettings) -> NoReturn:
    """Replays the file and ends the process: status 0 if all results are equal, else 1. Raises RunnerError if the file
    cannot be read or replayed here, and ModelError if its model cannot be loaded."""
    reader = TapeReader(settings.file)
    recorded = reader.settings
    log.debug("replaying", **cpu.preload(recorded.blas, recorded.blas_threads, recorded.kernels)._asdict())
    try:
        from runner.tape.replay import replay_tape
    except ImportError as error:
        raise no_mlx(error) from error
    model = open_model(settings.model or recorded.model, settings.models_dir, chooser(recorded))
    model = model._replace(context_length=context_limit(model.context_length, recorded.context_tokens))
    check_identity(reader.header, recorded, model)
    tokenizer = open_tokenizer(model.file, merge_eos=not model.checkpoint.from_store)
    if reader.missing_at is not None:
        _say(f"the end of the recording is missing, from byte {reader.missing_at} on; replaying what is there")
    done = replay_tape(
        reader, recorded, model, tokenizer, lambda requests, slices: _say(f"{_counts(requests, slices)}")
    )
    _say(f"{_counts(done.requests, done.slices)}: {done.difference or 'equal'}")
    sys.exit(1 if done.difference else 0)


def _counts(requests: int, slices: int) -> str:
    return f"{requests} request{'s' * (requests != 1)}, {slices} slice{'s' * (slices != 1)}"


def _say(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()
