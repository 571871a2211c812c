"""The runner's own numbers: `GET /v1/stats` and `GET /v1/cache`, and the same as server-sent events.

Keys are the names of the fields. Counters begin at 0 with the process and never decrease. Units are in the names, or
are stated here.
"""

import msgspec


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that run and wait now, and the others by their end. Each counts once."""

    running: int = 0
    queued: int = 0
    done: int = 0
    """The model, a stop string or a grammar ended the answer."""
    length: int = 0
    """The answer has as many tokens as were asked for, or as the context holds."""
    cancelled: int = 0
    """The client closed the connection."""
    failed: int = 0
    refused: int = 0
    """The request could not be computed, and nothing was begun: an invalid body, a prompt too long."""


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all requests that have begun."""

    prompt: int = 0
    matched: int = 0
    """Prompt tokens that were known to the cache when the request began."""
    cached: int = 0
    """Prompt tokens that were taken from the cache, not computed again."""
    recomputed: int = 0
    """Prompt tokens that were not taken from the cache."""
    generated: int = 0
    forced: int = 0
    """Generated tokens about which a grammar left no choice."""


class ScoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of scores that have begun, and the tokens of their prompts. Each row is a request."""

    rows: int = 0
    tokens: int = 0
    cached: int = 0


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the prefix cache, and what it evicted and restored so far."""

    budget_bytes: int | None = None
    """The most that the cache may hold; None: no bound."""
    held_bytes: int = 0
    """Live and paged out."""
    live_bytes: int = 0
    """In the buffers of layers, room for tokens to come included."""
    paged_bytes: int = 0
    """Copied out of the buffers, in bytes of its own."""
    evicted_bytes: int = 0
    """All bytes evicted so far, to make room."""
    restored_bytes: int = 0
    """All bytes restored so far into the buffers of layers."""
    nodes: int = 0
    evictions: int = 0
    """Nodes evicted so far, to make room."""
    misses: dict[str, int] = {}
    """Requests of which less was cached than they share with the cache, or that share nothing, by reason."""


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
    """The slices that the engine has computed."""

    begin: int = 0
    prefill: int = 0
    encode: int = 0
    """Pieces of pictures."""
    decode: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    """The answers in each decode step, summed over all steps."""
    prefill_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0


class PictureCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures of all prompts; all zero for a model that sees none."""

    encoded: int = 0
    """Those that went through the tower."""
    soft_tokens: int = 0
    """The tokens that these took in prompts."""
    encode_s: float = 0.0
    """The time that this took."""
    feature_hits: int = 0
    """Those whose keys and values were gone, but not their features."""
    feature_bytes: int = 0
    """Features kept for later prompts."""
    pixel_bytes: int = 0
    """Pixels that were decoded, and have yet to be encoded."""


class DraftModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The model that drafts."""

    name: str
    bytes: int
    """What it holds beside its weights."""
    state: str
    """`on`, `resting` or `off`, as in `DraftCounts`."""
    why: str


class DraftCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of all answers. Their sources: `path`, another conversation in the cache that begins with all of this
    one; `own`, the text of the request itself; `earlier`, earlier answers; `model`, a model that drafts; `known`, the
    greedy answer to the same prompt, whose tokens are not even tried."""

    rounds: int = 0
    """The decode steps that tried drafts."""
    drafted: dict[str, int] = {}
    """The tokens that were tried, by source."""
    accepted: dict[str, int] = {}
    """Those of them that were right."""
    state: str = "off"
    """`on`, `resting` (drafts were slower lately) or `off`: of drafts from known text."""
    why: str = ""
    """The reason for the state."""
    model: DraftModelState | None = None
    """None if no model drafts."""


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The disk cache; all zero without `--disk-cache`."""

    state: str = "none"
    """`on`, `reading` (nothing is written any more), `off` (after an error) or `none` (not asked for)."""
    segments: int = 0
    """The files of this model."""
    held_bytes: int = 0
    """Of all models, as all processes count them."""
    budget_bytes: int = 0
    """The most that all models may hold."""
    written_bytes: int = 0
    """By this process, as the following."""
    read_bytes: int = 0
    evicted_bytes: int = 0
    restores: int = 0
    """The requests for which something was restored."""
    restored_tokens: int = 0
    restore_s: float = 0.0
    """The time that requests waited for these."""
    copy_s: float = 0.0
    """The engine's time that writing took."""
    pending_tokens: int = 0
    """Tokens in memory that are not on disk."""
    write_errors: int = 0
    rejected: dict[str, int] = {}
    """Files that were refused, by reason: `torn`, `crc`, `tokens` (another prompt's) or `layers` (another model's)."""
    checks: int = 0
    """Restored segments that were computed again, to compare."""
    failed_checks: int = 0
    """Those that were something else: each time all files of this model were removed."""


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request between its arrival and its end."""

    number: int
    """The name of the request in the log."""
    phase: str
    """`queued`, `prefill`, `grammar` (the prompt is computed, the grammar still being compiled) or `decode`."""
    prompt: int
    """The tokens of the prompt."""
    cached: int = 0
    restored: int = 0
    """Those of the cached tokens that were brought from disk for the request."""
    prefilled: int = 0
    """The tokens of the prompt that the layers hold, the cached ones included."""
    generated: int = 0
    max_tokens: int = 0
    """The most that the answer may have."""
    age_s: float = 0.0
    """The time since the request arrived."""
    tokens_per_s: float = 0.0
    """The rate in the present phase."""
    ttft_s: float | None = None
    """The time from arrival to the first token; None before that."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes that compute the model together."""

    rank: int
    name: str
    """Its rank, and its process or address."""
    memory_bytes: int
    """The memory that MLX has in use there, as of its last beat."""


class RankCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks; all empty if one process has the whole model."""

    backend: str = ""
    """`ring` or `nccl`."""
    latency_us: int = 0
    """Of a sum of 16 KB over all ranks, at the start."""
    gbit_s: float = 0.0
    """Of a sum of 8 MB, by the bytes that each rank sends."""
    tape_bytes: int = 0
    """Sent to each follower so far, so that it computes the same."""
    members: list[Rank] = []
    """The leader, which is rank 0, then its followers."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers, as of one moment between two slices."""

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
    scores: ScoreCounts = ScoreCounts()
    cache: CacheCounts = CacheCounts()
    memory: MemoryCounts = MemoryCounts()
    slices: SliceCounts = SliceCounts()
    pictures: PictureCounts = PictureCounts()
    drafts: DraftCounts = DraftCounts()
    disk: DiskCounts = DiskCounts()
    ranks: RankCounts = RankCounts()
    running: list[RunningRequest] = []
    """The running requests, then the waiting ones, in the order of arrival."""
    ttft_s: float | None = None
    """The time to the first token of the last request that had one."""


class CacheNode(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the trie, and the snapshots of its tokens."""

    id: int
    """The name of the node as long as it lives; below 2**53."""
    parent: int | None
    """The id of the parent; None for a child of a root, which is no node."""
    start: int
    """The tokens from the root to the beginning of the edge."""
    end: int
    bytes: int
    """Live and paged out."""
    live_bytes: int
    """In the buffers of layers. Approximate: buffers have room for further tokens."""
    paged_bytes: int
    layers: int
    """The layers that the model uses."""
    live_layers: int
    paged_layers: int
    missing_layers: int
    """The layers of which nothing is kept here."""
    idle_uses: int
    """The number of uses of the trie since this node was last used."""
    locks: int
    """The open sessions whose prompts pass through the node."""
    restore_point: bool
    stored: int = 0
    """The tokens of the edge, from its beginning, that are on disk."""
    restored: bool = False
    """True if some of it was brought from disk."""
    pictures: int = 0
    """The pictures in the edge's tokens."""
    text: str | None = None
    """The beginning of the edge's text; only if the runner was started with --inspect-text."""


class CachePicture(msgspec.Struct, frozen=True, kw_only=True):
    """The trie at one moment, parents before their children. A very large trie is cut to the nodes used last;
    `CacheCounts` has the number of all nodes."""

    generation: int
    """Differs from an earlier one if anything has changed."""
    kind: str
    nodes: list[CacheNode] = []
