"""The formats of answers, compiled to grammars by processes that start with the first request for a format."""

import os
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from protocol import Format
from runner.model import OpenedModel
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.grammar import Grammar, WorkerPool

_LEAST_WORKER_BYTES = 32 << 20
_SHARE = 8  # one worker may take this part, 1/8, of the memory that the model leaves


class Formats:
    """Compiles the formats of one engine's requests. Owner: the event loop, except for `nbytes`."""

    def __init__(self, model: OpenedModel, tokenizer: Tokenizer, running: int, room_bytes: int) -> None:
        """`running`: the most answers computed at once. `room_bytes`: the memory budget less the model."""
        self._model = model
        self._tokenizer = tokenizer
        self._running = running
        self._room_bytes = room_bytes

    def compile(self, wanted: Format) -> "Future[Grammar]":
        """Starts to compile; cancel the future to stop. The future raises RequestError for an invalid format."""
        return self._workers.compile(wanted)

    @property
    def nbytes(self) -> int:
        """The bytes that grammars take. Any thread may ask."""
        workers: WorkerPool | None = self.__dict__.get("_workers")
        return workers.nbytes if workers is not None else 0

    @cached_property
    def _workers(self) -> "WorkerPool":
        from runner.grammar import CompilerSetup, WorkerPool

        model, size = self._model, self._tokenizer.vocab_size
        files = {name: os.fsencode(file.path) for name, file in model.checkpoint.files.items()}
        setup = CompilerSetup(files, merge_eos=not model.checkpoint.from_store, vocab_size=model.vocab_size)
        workers = WorkerPool(setup, min(model.vocab_size or size, size), self._running)
        workers.worker_bytes = max(_LEAST_WORKER_BYTES, min(workers.worker_bytes, self._room_bytes // _SHARE))
        return workers
