"""The wing for structured output, and the report of `mlx-runner check --format`."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from protocol import Format, FormatError, decode_format
from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.errors import RequestError, RunnerError
from runner.grammar.worker_pool import WorkerPool, pool_for
from runner.settings import CheckSettings

_GRAMMAR_BYTES = 4 << 20
"""The memory that is planned for the grammar of one answer. Only large schemas take more."""


class FormatFacts(Facts, frozen=True, kw_only=True):
    """The report on a format: the treatment of a request with that format."""

    enforced: Literal["whole", "in part", "not at all"]
    why: str | None = None
    """The first part of the format that is left out, as the log names it, or the message of the refusal."""

    @property
    def is_fault(self) -> bool:
        return self.enforced == "not at all"

    @property
    def text(self) -> str:
        """The line of the report, as text."""
        what = {"whole": "enforced", "in part": "enforced in part, without this", "not at all": "refused"}
        return what[self.enforced] + (f": {self.why}" if self.why else "")


def format_facts(path: Path, found: Examined) -> FormatFacts:
    """Compiles the format in the file `path`, or in standard input if `path` is `-`. The worker has the same limits as
    while serving. Raises RunnerError if the file cannot be read."""
    try:
        text = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise RunnerError(f"--format {path}: {(error.strerror or str(error)).lower()}") from error
    free_bytes = found.budget_bytes - found.types.nbytes(found.loaded.module)
    try:
        wanted = decode_format(text.strip())
        if wanted is None:
            return FormatFacts(enforced="not at all", why="the file has no format")
        left_out = asyncio.run(_left_out(wanted, pool_for(found.model, found.tokenizer, 1, free_bytes)))
    except (FormatError, RequestError) as error:
        return FormatFacts(enforced="not at all", why=str(error))
    return FormatFacts(enforced="in part", why=left_out) if left_out else FormatFacts(enforced="whole")


async def _left_out(wanted: Format, workers: WorkerPool) -> str:
    try:
        _, beginning = await workers.compiled(msgspec.json.encode(wanted))
        return beginning.left_out
    finally:
        await workers.close()


class GrammarWing(Wing):
    """The wing for structured output. Its processes start when the first format arrives."""

    name = "grammar"

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        """Compiles the format of the file that `--format` names, and returns the report."""
        if settings.format is None or found is None:
            return {}
        return {"format": format_facts(settings.format, found)}

    def plug(self, parts: Parts) -> None:
        """Makes the pool of workers. The pool's memory is a share of the memory that the model leaves free."""
        workers = pool_for(parts.model, parts.tokenizer, parts.settings.parallel, parts.free_bytes)
        parts.formats = workers
        if parts.shares_memory:
            parts.grammar_bytes = _GRAMMAR_BYTES
            parts.helper_bytes.append(lambda: workers.nbytes)
            parts.drop_unused.append(workers.end_kept)
