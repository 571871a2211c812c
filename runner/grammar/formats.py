"""The formats of answers, compiled to grammars by processes that start with the first request for a format."""

import os
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from protocol import Format
from runner.engine.parts import Parts, Wing
from runner.model import OpenedModel
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.guide import Grammar
    from runner.grammar import WorkerPool

GRAMMAR_BYTES = 4 << 20
"""Memory for the grammar of one answer; only those of large schemas take more."""
_LEAST_WORKER_BYTES = 32 << 20
_SHARE = 8  # one worker may take this part, 1/8, of the memory that the model leaves
_KEPT_SHARE = 32  # and all those that no answer uses this part of it


class Formats:
    """Compiles the formats of one engine's requests. Owner: the event loop, except for `nbytes` and `end_kept`."""

    def __init__(self, model: OpenedModel, tokenizer: Tokenizer, running: int, room_bytes: int) -> None:
        """`running`: the most answers computed at once. `room_bytes`: the memory budget less the model."""
        self._model = model
        self._tokenizer = tokenizer
        self._running = running
        self._room_bytes = room_bytes

    def expect(self) -> "Future[Grammar]":
        """Returns the grammar of a request that waits in the queue, for `compile`."""
        return self._workers.expect()

    def compile(self, wanted: Format, grammar: "Future[Grammar]") -> None:
        """Starts to compile; cancel the future to stop. The future raises RequestError for an invalid format."""
        self._workers.compile(wanted, grammar)

    @property
    def nbytes(self) -> int:
        """The bytes that grammars take. Any thread may ask."""
        return self._started.nbytes if self._started is not None else 0

    def end_kept(self) -> None:
        """Frees the grammars that no answer uses. Any thread may call it."""
        if self._started is not None:
            self._started.end_kept()

    @property
    def _started(self) -> "WorkerPool | None":
        """The workers, if there has been a format."""
        return self.__dict__.get("_workers")

    @cached_property
    def _workers(self) -> "WorkerPool":
        from runner.grammar import CompilerSetup, WorkerPool

        model, size = self._model, self._tokenizer.vocab_size
        files = {name: os.fsencode(file.path) for name, file in model.checkpoint.files.items()}
        setup = CompilerSetup(files, merge_eos=not model.checkpoint.from_store, vocab_size=model.vocab_size)
        workers = WorkerPool(setup, min(model.vocab_size or size, size), self._running)
        workers.worker_bytes = max(_LEAST_WORKER_BYTES, min(workers.worker_bytes, self._room_bytes // _SHARE))
        workers.most_kept_bytes = min(workers.most_kept_bytes, self._room_bytes // _KEPT_SHARE)
        return workers


class GrammarWing(Wing):
    """Structured output."""

    def plug(self, parts: Parts) -> None:
        formats = Formats(parts.model, parts.tokenizer, parts.settings.parallel, parts.free_bytes)
        parts.formats = formats
        if parts.shares_memory:
            parts.grammar_bytes = GRAMMAR_BYTES
            parts.helper_bytes.append(lambda: formats.nbytes)
            parts.drop_unused.append(formats.end_kept)
