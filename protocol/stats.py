"""What the runner tells of itself: `GET /v1/stats` and `GET /v1/cache`, and the same as server-sent events.

Keys are those of the fields. Counters begin with the process and never go back; bytes, seconds and tokens stand in the
names, or are said here.
"""

import msgspec


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many run and wait now, and how the others ended: each once."""

    running: int = 0
    queued: int = 0
    done: int = 0
    """The model, a stop string or a grammar ended the answer."""
    length: int = 0
    """It has as many tokens as were asked for, or as the context holds."""
    cancelled: int = 0
    """The client went away."""
    failed: int = 0
    refused: int = 0
    """They could not be computed, and were told so before anything was begun: a wrong body, a prompt too long."""


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all requests that have begun."""

    prompt: int = 0
    matched: int = 0
    """Of prompts: known to the cache when they began."""
    cached: int = 0
    """Of prompts: taken from the cache, not computed again."""
    recomputed: int = 0
    """Of prompts: all but the cached ones."""
    generated: int = 0
    forced: int = 0
    """Of those that were generated: a grammar left no choice about them."""


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache holds, and what has become of what it held."""

    budget_bytes: int | None = None
    """The most that it may hold; None: without bound."""
    held_bytes: int = 0
    """Live and paged out."""
    live_bytes: int = 0
    """In the buffers of layers, room for tokens to come included."""
    paged_bytes: int = 0
    """Copied out of the buffers, in bytes of its own."""
    evicted_bytes: int = 0
    """Ever given up for want of room."""
    restored_bytes: int = 0
    """Ever taken back into the buffers of layers."""
    nodes: int = 0
    evictions: int = 0
    """Nodes that went for want of room."""
    misses: dict[str, int] = {}
    """Requests of which less was cached than they share with the cache, or that share nothing, by the reason."""


class MemoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device's memory."""

    used_bytes: int = 0
    reusable_bytes: int = 0
    """Freed, and kept by MLX for the next arrays."""
    peak_bytes: int = 0
    """The most that was ever used."""
    budget_bytes: int | None = None
    """The most that may be used; None: whatever there is."""
    weights_bytes: int = 0


class SliceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has done, slice by slice."""

    begin: int = 0
    prefill: int = 0
    decode: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    """Of all decode steps: answers that took part."""
    prefill_s: float = 0.0
    decode_s: float = 0.0


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request between its arrival and its end."""

    number: int
    """Its name in the log."""
    phase: str
    """`queued`, `prefill`, `grammar` (the prompt is read, the grammar is still being compiled) or `decode`."""
    prompt: int
    """Its tokens."""
    cached: int = 0
    prefilled: int = 0
    """Tokens of the prompt that its layers hold, the cached ones included."""
    generated: int = 0
    max_tokens: int = 0
    """The most that the answer may have."""
    age_s: float = 0.0
    """Since it arrived."""
    tokens_per_s: float = 0.0
    """Of its present phase."""
    ttft_s: float | None = None
    """From its arrival to its first token, once that is there."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as of one moment between two slices."""

    version: str
    """Of the runner."""
    model: str
    architecture: str
    device: str
    """`gpu` or `cpu`."""
    context_length: int
    cache_kind: str
    """`trie`, `single` or `none`."""
    uptime_s: float = 0.0
    requests: RequestCounts = RequestCounts()
    tokens: TokenCounts = TokenCounts()
    cache: CacheCounts = CacheCounts()
    memory: MemoryCounts = MemoryCounts()
    slices: SliceCounts = SliceCounts()
    running: list[RunningRequest] = []
    """Those that run, then those that wait, in the order of their arrival."""
    ttft_s: float | None = None
    """Of the last request that had a first token."""


class CacheNode(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the trie and what is kept of its tokens."""

    id: int
    """Names the node as long as it lives; below 2**53."""
    parent: int | None
    """None: it hangs from a root, which is no node."""
    start: int
    """Tokens from the root to where the edge begins."""
    end: int
    bytes: int
    """Live and paged out."""
    live_bytes: int
    """In the buffers of layers; about, for those hold room for tokens to come too."""
    paged_bytes: int
    layers: int
    """Of the model, as far as it makes use of them."""
    live_layers: int
    paged_layers: int
    missing_layers: int
    """Of these layers nothing is kept here."""
    idle_uses: int
    """How many uses of the trie ago this node was of use."""
    locks: int
    """Open sessions that go through it."""
    restore_point: bool
    text: str | None = None
    """The beginning of the edge's text; only where the runner was told to show it."""


class CachePicture(msgspec.Struct, frozen=True, kw_only=True):
    """The trie at one moment, parents before their children. Of a very large one the nodes that were of use last; how
    many there are in all stands in `CacheCounts`."""

    generation: int
    """Another one wherever something has changed."""
    kind: str
    nodes: list[CacheNode] = []
