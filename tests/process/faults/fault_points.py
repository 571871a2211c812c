"""The places in the runner at which a test can make something go wrong, by name, and how to do it there.

A point stands for one thing that can fail; the functions behind it are those that do it for one kind of layer or cache
or another. Used inside a test and, by `faulty.py`, inside a spawned process.
"""

import errno
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hook = Callable[[str], BaseException | None]
"""Called with the name of the point before every call. What it raises goes wrong before anything was done; what it
returns is raised when the call has done its work."""

_LAYERS = "runner.cache.layers"

_ALONE: dict[str, tuple[str, ...]] = {
    "forward": ("runner.model.weights.loading:LoadedModel.logits",),
    "evaluate": ("mlx.core:eval",),
    "start evaluation": ("mlx.core:async_eval",),
    "clear MLX's cache": ("mlx.core:clear_cache",),
    "make sampler": ("runner.sampling.sampler:Sampler.__init__",),
    "sample": ("runner.sampling.sampler:Sampler.__call__",),
    "read": ("runner.sampling.sample:SampledTokens.read",),
    "logprobs": ("runner.sampling.sample:log_probabilities",),
    "begin": ("runner.cache.single:SingleEntryCache.begin", "runner.cache.trie_cache:TrieCache.begin"),
    "open session": ("runner.cache.single:SingleEntryCache._open_session", "runner.cache.trie_cache:TrieCache._resume"),
    "plan": ("runner.cache.session:Session.next_forward",),
    "record": ("runner.cache.session:Session.record",),
    "close session": ("runner.cache.session:Session.close",),
    "end session": ("runner.cache.single:SingleEntryCache._close", "runner.cache.trie_cache:TrieCache._close"),
    "keep": ("runner.cache.single:SingleEntryCache._release", "runner.cache.trie_cache:TrieCache._store"),
    "count forward": ("runner.cache.sequence:SequenceLayers.count_forward",),
    "rewind layers": ("runner.cache.sequence:SequenceLayers.rewind",),
    "page out unsliceable": ("runner.cache.sequence:SequenceLayers.page_out_unsliceable",),
    "reset": ("runner.cache.sequence:SequenceLayers.reset",),
    "evaluate layers": ("runner.cache.sequence:SequenceLayers.evaluate",),
    "rewind": (f"{_LAYERS}.adapter:LayerState.rewind",),
    "decode text": ("runner.tokenizer.detokenizer:Detokenizer.push", "runner.tokenizer.detokenizer:Detokenizer.finish"),
    "spell token": ("runner.tokenizer.tokenizer:Tokenizer.token_text",),
    "count": ("runner.engine.generation:Generation.metrics",),
    "close generation": ("runner.engine.generation:Generation.close",),
    "hand over": ("runner.engine.events:Outbox.put", "runner.engine.events:Outbox.send"),
    "report": ("runner.numbers.journal:log_end",),
    "start batch": ("runner.engine.batch:Batch.__init__",),
    "part": ("runner.engine.batch:Batch.leave",),
    "part rows": ("runner.cache.session:DecodeRows.keep",),
    "settle row": ("runner.cache.session:DecodeRows.settle",),
    "return to prefill": ("runner.engine.generation:Generation.return_to_prefill",),
}
"""Points that any request reaches, in any cache; the last one only after a fault."""
_TRIE: dict[str, tuple[str, ...]] = {
    "page out layers": ("runner.cache.sequence:SequenceLayers.page_out",),
    "trim": ("runner.cache.sequence:SequenceLayers.trim",),
    "resume": ("runner.cache.resume:deepest_offset", "runner.cache.resume:restore_to"),
    "capture": ("runner.cache.resume:store_snapshots", "runner.cache.resume:replace_copies"),
    "snapshot": (
        f"{_LAYERS}.kv:KVState.snapshot",
        f"{_LAYERS}.window:TailState.snapshot",
        f"{_LAYERS}.states:CountedState.snapshot",
    ),
    "restore": (
        f"{_LAYERS}.kv:KVState.restore",
        f"{_LAYERS}.window:TailState.restore",
        f"{_LAYERS}.states:CountedState.restore",
    ),
    "copy": (
        f"{_LAYERS}.kv:KVState.copy_tokens",
        f"{_LAYERS}.window:WindowState.copy_tokens",
        f"{_LAYERS}.window:ChunkState.copy_tokens",
        f"{_LAYERS}.states:RecurrentState.copy_tokens",
        f"{_LAYERS}.states:GenericState.copy_tokens",
    ),
    "page out": (f"{_LAYERS}.snapshot:LayerSnapshot.page_out",),
    "page in": (f"{_LAYERS}.snapshot:LayerSnapshot.page_in",),
    "split snapshot": (f"{_LAYERS}.snapshot:SliceSnapshot.split", f"{_LAYERS}.snapshot:StateSnapshot.split"),
    "merge snapshots": (
        f"{_LAYERS}.snapshot:SliceSnapshot.after",
        f"{_LAYERS}.snapshot:TailSnapshot.after",
        f"{_LAYERS}.snapshot:StateSnapshot.after",
    ),
    "release bytes": (f"{_LAYERS}.snapshot:LayerSnapshot._release",),
    "close snapshot": (f"{_LAYERS}.snapshot:LayerSnapshot.close",),
    "match": ("runner.cache.trie:PrefixTrie.match",),
    "advance": ("runner.cache.trie:PrefixTrie.extend",),
    "split": ("runner.cache.trie:PrefixTrie.split",),
    "merge": ("runner.cache.trie:PrefixTrie.merge",),
    "remove": ("runner.cache.trie:PrefixTrie.remove",),
    "drop": ("runner.cache.trie:PrefixTrie.drop",),
    "lock": ("runner.cache.trie:PrefixTrie.lock",),
    "unlock": ("runner.cache.trie:PrefixTrie.unlock",),
    "evict": ("runner.cache.trie_cache:TrieCache.enforce_budget",),
    "choose victim": ("runner.cache.eviction:Eviction.victims",),
    "truncate": ("runner.cache.resume:truncate",),
    "admit": ("runner.cache.trie_cache:TrieCache.admits", "runner.cache.trie_cache:TrieCache.allows"),
    "acquire layers": ("runner.cache.sequences:LiveSequences.acquire",),
    "release layers": ("runner.cache.sequences:LiveSequences.release",),
    "claim live": ("runner.cache.resume:make_live",),
    "follow": ("runner.cache.trie_cache:TrieCache._follows",),
    "reserve": ("runner.cache.trie_cache:TrieCache.reserve",),
}
"""Points that only the trie reaches."""
_CONCURRENT: dict[str, tuple[str, ...]] = {
    "arrays of rows": ("runner.cache.session:DecodeRows.arrays",),
    "add checkpoint": ("runner.cache.session:TrieSession.add_checkpoint",),
    "evict layers": ("runner.cache.sequences:LiveSequences._evict",),
    "join": ("runner.engine.batch:Batch.join",),
    "join rows": ("runner.cache.session:DecodeRows.join",),
    "join layers": (f"{_LAYERS}.batched:BatchedLayers.__init__", f"{_LAYERS}.batched:BatchedLayers.extend"),
    "join samples": ("runner.sampling.sample:SampledTokens.joined",),
    "join samplers": ("runner.sampling.sampler:SamplerBatch.__init__",),
    "sample together": ("runner.sampling.sampler:SamplerBatch.__call__",),
    "release samplers": ("runner.sampling.sampler:SamplerBatch.release",),
    "make room": (f"{_LAYERS}.batched:BatchedLayers.make_room",),
    "part layers": (f"{_LAYERS}.batched:BatchedLayers.keep",),
    "part samples": ("runner.sampling.sample:SampledTokens.take",),
    "absorb": ("runner.cache.session:Session.absorb",),
    "absorb layers": ("runner.cache.sequence:SequenceLayers.absorb",),
}
"""Points that only concurrent requests reach."""
_DRAFTED: dict[str, tuple[str, ...]] = {
    "propose drafts": ("runner.drafts.drafting:AnswerDrafter.propose",),
    "record drafts": ("runner.drafts.drafting:AnswerDrafter.record_outcome",),
    "time a step": ("runner.drafts.drafting:Drafting.record_time",),
    "keep an answer": ("runner.drafts.drafting:AnswerDrafter.close",),
    "draw ahead": ("runner.sampling.sampler:Sampler.draw_ahead",),
    "open round": ("runner.cache.session:Session.draft_round",),
    "mark layers": ("runner.cache.sequence:SequenceLayers.mark",),
    "accept drafts": ("runner.cache.session:Session.accept",),
    "draft rows": ("runner.cache.session:DecodeRows.draft",),
    "accept rows": ("runner.cache.session:DecodeRows.accept",),
    "accept layers of rows": (f"{_LAYERS}.batched:BatchedLayers.accept",),
    "revert layers": ("runner.cache.sequence:SequenceLayers.revert",),
}
"""Points that only drafted answers reach."""
POINTS = {**_ALONE, **_TRIE, **_CONCURRENT, **_DRAFTED}

LOADING: dict[str, tuple[str, ...]] = {
    "open model": ("runner.app:open_model",),
    "open tokenizer": ("runner.tokenizer:open_tokenizer",),
    "load": ("runner.model.weights.loading:load",),
    "read tensors": ("runner.model.weights.reading:_read_group",),
    "evaluate": POINTS["evaluate"],
}
"""Points before the first request. The last one is reached with a file open and its arrays not read yet."""

FATAL = ("hand over", "report", "admit", "reserve")
"""A fault at these points is one of the engine itself and ends the process."""

CONCURRENT_ONLY = frozenset(_CONCURRENT) | {"admit"}
HARMLESS = CONCURRENT_ONLY - {"absorb", "absorb layers"}
"""Points at which a fault ends no request."""


@contextmanager
def watching(hook: Hook, *names: str) -> Iterator[None]:
    """Inside the block `hook` is called before every call at these points. A model must be loaded
    inside it for its forward to count."""
    undo: list[Callable[[], None]] = []
    try:
        for name in names:
            undo.extend(_watch(place, name, hook) for place in (POINTS | LOADING)[name])
        yield
    finally:
        for each in reversed(undo):
            each()


def _watch(place: str, name: str, hook: Hook) -> Callable[[], None]:
    module, _, path = place.partition(":")
    *owners, attribute = path.split(".")
    owner: object = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    original: Callable[..., object] = getattr(owner, attribute)

    def watched(*arguments: object, **named: object) -> object:
        late = hook(name)
        result = original(*arguments, **named)
        if late is not None:
            raise late
        return result

    setattr(owner, attribute, watched)
    return lambda: setattr(owner, attribute, original)


NO_MEMORY = "[malloc] Unable to allocate 123456789 bytes."
"""MLX's message on Metal when memory runs out."""

FAULTS: dict[str, Callable[[], BaseException]] = {
    "fault": lambda: RuntimeError("Error: mlx: panic: CUDA error, allocation failed in a place that has no memory"),
    "python memory": MemoryError,
    "mlx memory": lambda: RuntimeError(NO_MEMORY),
    "disk": lambda: OSError(errno.EIO, os.strerror(errno.EIO), "/models/blobs/sha256-7f"),
    "exit": lambda: SystemExit("Error: mlx: enough"),
}
"""Faults by name. The first contains markers of a host's scanner and a misleading phrase about memory; the last one
must not be caught."""
