"""The runner's own numbers: `GET /v1/stats` and `GET /v1/cache`, the same as server-sent events, and `GET /metrics`.

Keys are the names of the fields. Counters begin at 0 with the process and never decrease. Units are in the names or in
the docstrings. The annotation of a field is its metric in `/metrics`, whose help describes the field.
"""

from typing import Annotated

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """A field's sample of a metric; another field of the struct states the metric itself."""

    name: str
    """The name in `/metrics` without `mlx_runner_`, and without the `_total` of counters and the `_info` of texts."""
    of: str
    """The value of the metric's label; for an `Info` the label."""
    less: str = ""
    """A field of the same struct, whose number is subtracted."""


class Metric(msgspec.Struct, frozen=True):
    """A field's metric, and its sample of it. `name`, `of` and `less` are as in `Sample`."""

    name: str
    help: str
    label: str = ""
    """A dict has a sample for each key. A list has a sample for each struct, whose field `label` is the value of the
    label and whose field `of` is the number; without a label its only sample is its length."""
    of: str = ""
    less: str = ""
    per: float = 1
    """The number is divided by this, for the unit of the metric."""
    before: str = ""
    """The metric that this one precedes in `/metrics`, where that is not the order of the fields."""


class Counter(Metric, frozen=True):
    """A number that never decreases."""


class Gauge(Metric, frozen=True):
    """A number that may decrease."""


class Histogram(Metric, frozen=True):
    """A distribution."""


class Info(Metric, frozen=True):
    """Texts that never change."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that run and wait now, and the ended requests by outcome. Each counts once."""

    running: Annotated[int, Gauge("requests_running", "Requests being computed.")] = 0
    queued: Annotated[int, Gauge("requests_queued", "Requests waiting to be computed.")] = 0
    done: Annotated[
        int, Counter("requests", "Requests that have ended, by outcome.", "outcome", "done", before="requests_running")
    ] = 0
    """The model, a stop string or a grammar ended the answer."""
    length: Annotated[int, Sample("requests", "length")] = 0
    """The answer has the wanted number of tokens, or has filled the context."""
    cancelled: Annotated[int, Sample("requests", "cancelled")] = 0
    """The client closed the connection."""
    failed: Annotated[int, Sample("requests", "failed")] = 0
    """A fault ended the request, or a lack of memory, or a grammar that could not be followed to the end."""
    refused: Annotated[int, Sample("requests", "refused")] = 0
    """The request could not begin: its body is invalid, say, or its prompt too long."""


class TokenCounts(msgspec.Struct, kw_only=True):
    """The tokens of all requests that have begun."""

    prompt: int = 0
    matched: Annotated[
        int,
        Counter("matched_tokens", "Prompt tokens that matched a cached prefix, whether or not they could be reused."),
    ] = 0
    cached: Annotated[
        int,
        Counter(
            "prompt_tokens",
            "Prompt tokens, by source: reused from the cache or computed.",
            "source",
            "cache",
            before="matched_tokens",
        ),
    ] = 0
    recomputed: Annotated[int, Sample("prompt_tokens", "computed")] = 0
    generated: Annotated[
        int,
        Counter(
            "generated_tokens",
            "Generated tokens, by source: sampled, or forced by a grammar.",
            "source",
            "sampled",
            less="forced",
        ),
    ] = 0
    forced: Annotated[int, Sample("generated_tokens", "forced")] = 0
    """Generated tokens that were the grammar's only choice."""


class ScoreCounts(msgspec.Struct, kw_only=True):
    """Rows of scores that have begun, and the tokens of their prompts. Each row is a request."""

    rows: Annotated[int, Counter("score_rows", "Requests that were rows of scores.")] = 0
    tokens: Annotated[int, Sample("score_tokens", "computed", less="cached")] = 0
    cached: Annotated[int, Counter("score_tokens", "Prompt tokens of these, by source.", "source", "cache")] = 0


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the prefix cache, and what it evicted and restored so far."""

    budget_bytes: Annotated[int | None, Gauge("cache_budget_bytes", "Most bytes that the cache may hold.")] = None
    """None: no bound."""
    held_bytes: int = 0
    """Live and paged out."""
    live_bytes: Annotated[
        int,
        Gauge(
            "cache_bytes",
            "Bytes held by the cache: live in the buffers of layers, or paged out of them.",
            "state",
            "live",
            before="cache_budget_bytes",
        ),
    ] = 0
    paged_bytes: Annotated[int, Sample("cache_bytes", "paged")] = 0
    """Copies outside the buffers of layers."""
    evicted_bytes: Annotated[int, Counter("cache_evicted_bytes", "Bytes evicted to make room.")] = 0
    restored_bytes: Annotated[int, Counter("cache_restored_bytes", "Bytes restored into the buffers of layers.")] = 0
    nodes: Annotated[int, Gauge("cache_nodes", "Nodes of the prefix trie.", before="cache_budget_bytes")] = 0
    evictions: Annotated[
        int, Counter("cache_evictions", "Nodes evicted to make room.", before="cache_evicted_bytes")
    ] = 0
    misses: Annotated[
        dict[str, int],
        Counter("cache_misses", "Requests that reused less of the cache than they might have, by reason.", "reason"),
    ] = {}
    """Requests that reused less than they share with the cache, or that share nothing, by reason."""


class MemoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device's memory."""

    used_bytes: Annotated[int, Gauge("memory_used_bytes", "Device memory in use.")] = 0
    reusable_bytes: Annotated[int, Gauge("memory_reusable_bytes", "Freed memory that MLX keeps for new arrays.")] = 0
    peak_bytes: Annotated[int, Gauge("memory_peak_bytes", "Most device memory ever in use.")] = 0
    budget_bytes: Annotated[int | None, Gauge("memory_budget_bytes", "Most device memory that may be in use.")] = None
    """None: no bound."""
    weights_bytes: Annotated[
        int, Gauge("memory_weights_bytes", "Memory taken by the weights.", before="memory_budget_bytes")
    ] = 0


class SliceCounts(msgspec.Struct, kw_only=True):
    """The slices that the engine has computed."""

    begin: Annotated[int, Counter("slices", "Slices of computation, by kind.", "kind", "begin")] = 0
    prefill: Annotated[int, Sample("slices", "prefill")] = 0
    encode: Annotated[int, Sample("slices", "encode")] = 0
    """Pieces of media."""
    decode: Annotated[int, Sample("slices", "decode")] = 0
    prefill_tokens: Annotated[
        int, Counter("slice_tokens", "Tokens computed in slices, by kind.", "kind", "prefill")
    ] = 0
    decode_rows: Annotated[int, Sample("slice_tokens", "decode")] = 0
    """The sum over all decode steps of the answers in each."""
    prefill_s: Annotated[
        float, Counter("slice_seconds", "Time spent in slices, by kind.", "kind", "prefill", before="slice_tokens")
    ] = 0.0
    encode_s: Annotated[float, Sample("slice_seconds", "encode")] = 0.0
    decode_s: Annotated[float, Sample("slice_seconds", "decode")] = 0.0


class MediaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The media of all prompts; all zero for a model that takes none."""

    encoded: Annotated[int, Counter("media_encoded", "Pictures and sounds that went through a tower.")] = 0
    soft_tokens: Annotated[int, Counter("media_tokens", "Tokens that these took in prompts.")] = 0
    encode_s: Annotated[float, Counter("media_seconds", "Time spent in towers.")] = 0.0
    feature_hits: Annotated[int, Counter("media_feature_hits", "Media whose features were still known.")] = 0
    """Media whose features were kept, but whose keys and values were gone."""
    feature_bytes: Annotated[int, Gauge("media_feature_bytes", "Memory taken by features of media.")] = 0
    """Features kept for later prompts."""
    row_bytes: Annotated[int, Gauge("media_row_bytes", "Memory taken by rows that wait for a tower.")] = 0


class DraftModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The model that drafts."""

    name: str
    bytes: int
    """The memory that it holds beside its weights."""
    state: str
    """`on`, `resting` or `off`, as in `DraftCounts`."""
    why: str


class DraftCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of all answers. Their sources: `path`, a conversation in the cache that continues this one; `own`, the
    text of the request; `earlier`, earlier answers; `model`, a model that drafts; `known`, first tokens that were kept
    for the same prompt and need no trial."""

    rounds: Annotated[int, Counter("draft_rounds", "Decode steps that tried drafts.")] = 0
    drafted: Annotated[
        dict[str, int], Counter("drafted_tokens", "Tokens that were tried before they were drawn, by source.", "source")
    ] = {}
    accepted: Annotated[
        dict[str, int], Counter("accepted_tokens", "Drafted tokens that were right, by source.", "source")
    ] = {}
    state: str = "off"
    """The state of drafts from known text, at the last number of answers together: `on`, `resting` (drafts were slower
    lately) or `off`."""
    why: str = ""
    """The reason for the state."""
    model: DraftModelState | None = None
    """None if no model drafts."""


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The disk cache; all zero without `--disk-cache`."""

    state: str = "none"
    """`on`, `reading` (nothing is written any more), `off` (after an error) or `none` (not asked for)."""
    segments: Annotated[int, Gauge("disk_segments", "Files of this model.")] = 0
    held_bytes: Annotated[
        int, Gauge("disk_held_bytes", "Files of all models in the directory of the disk cache.", before="disk_segments")
    ] = 0
    """Of all models, as all processes count them."""
    budget_bytes: Annotated[
        int, Gauge("disk_budget_bytes", "The most that these may take.", before="disk_segments")
    ] = 0
    written_bytes: Annotated[int, Counter("disk_written_bytes", "Bytes written.")] = 0
    """By this process, like the counts that follow."""
    read_bytes: Annotated[int, Counter("disk_read_bytes", "Bytes read.")] = 0
    evicted_bytes: Annotated[
        int, Counter("disk_evicted_bytes", "Bytes removed to make room, or because of their age.")
    ] = 0
    restores: Annotated[int, Counter("disk_restores", "Requests for which something was restored.")] = 0
    restored_tokens: Annotated[int, Counter("disk_restored_tokens", "Tokens restored.")] = 0
    restore_s: Annotated[float, Counter("disk_restore_seconds", "Time that requests waited for these.")] = 0.0
    copy_s: Annotated[float, Counter("disk_copy_seconds", "The engine's time that writing took.")] = 0.0
    pending_tokens: Annotated[
        int, Gauge("disk_pending_tokens", "Tokens in memory that are not on disk.", before="disk_written_bytes")
    ] = 0
    write_errors: Annotated[int, Counter("disk_write_errors", "Files that could not be written.")] = 0
    rejected: Annotated[dict[str, int], Counter("disk_rejected", "Files that were refused, by reason.", "reason")] = {}
    """The reasons: `torn`, `crc`, `tokens` (another prompt's) or `layers` (another model's)."""
    checks: Annotated[
        int, Counter("disk_checks", "Restored segments that were computed again, to compare.", before="disk_rejected")
    ] = 0
    failed_checks: Annotated[
        int, Counter("disk_failed_checks", "Those that were something else.", before="disk_rejected")
    ] = 0
    """Each time, all files of this model were removed."""


class EmbeddingCounts(msgspec.Struct, kw_only=True):
    """The texts that were embedded; all zero for a model that makes no embeddings."""

    texts: Annotated[int, Counter("embedded_texts", "Texts that were embedded.")] = 0
    tokens: Annotated[int, Counter("embedded_tokens", "Their tokens.")] = 0
    padding: Annotated[int, Counter("embedding_padding_tokens", "Tokens computed beside these, to fill rows.")] = 0
    forwards: Annotated[int, Counter("embedding_forwards", "Forwards over these, each over some of them.")] = 0
    seconds: Annotated[float, Counter("embedding_seconds", "Time spent in these.")] = 0.0
    waiting: Annotated[int, Gauge("embedding_texts_waiting", "Texts that have arrived and are not embedded yet.")] = 0


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
    """The cached tokens that were read from disk for the request."""
    prefilled: int = 0
    """The tokens of the prompt that the layers hold, including cached ones."""
    generated: int = 0
    max_tokens: int = 0
    """The most tokens of the answer."""
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
    """The memory that MLX used there at its last beat."""


class RankCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks; all empty if one process has the whole model."""

    backend: str = ""
    """`ring` or `nccl`."""
    latency_us: Annotated[
        int, Gauge("rank_latency_seconds", "Of a sum of 16 KB over all ranks, at the start.", per=1e6)
    ] = 0
    gbit_s: float = 0.0
    """The rate of a sum of 8 MB over all ranks, by the bytes that each sends."""
    tape_bytes: Annotated[int, Counter("rank_tape_bytes", "Sent to each follower, so that it computes the same.")] = 0
    members: Annotated[
        list[Rank],
        Gauge(
            "ranks", "Processes that compute the model together; 0 if one has all of it.", before="rank_latency_seconds"
        ),
        Gauge("rank_memory_bytes", "Memory in use by MLX, by rank.", "rank", "memory_bytes"),
    ] = []
    """The leader, which is rank 0, then its followers."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers at one moment between two slices."""

    version: Annotated[str, Info("", "The runner and its model.", of="version")]
    """Of the runner."""
    model: Annotated[str, Sample("", "model")]
    """The model's name for people."""
    path: str = ""
    """The directory of the model; empty for one of a store."""
    architecture: Annotated[str, Sample("", "architecture")]
    device: Annotated[str, Sample("", "device")]
    """`gpu` or `cpu`."""
    context_length: Annotated[int, Gauge("context_tokens", "Most tokens that prompt and answer may have together.")]
    parallel: Annotated[int, Gauge("requests_parallel", "Most requests computed at once.")]
    cache_kind: Annotated[str, Sample("", "cache")]
    """`trie`, `single` or `none`."""
    uptime_s: Annotated[
        float, Gauge("uptime_seconds", "Seconds since the model was loaded.", before="context_tokens")
    ] = 0.0
    requests: RequestCounts = RequestCounts()
    tokens: TokenCounts = msgspec.field(default_factory=TokenCounts)
    scores: ScoreCounts = msgspec.field(default_factory=ScoreCounts)
    cache: CacheCounts = CacheCounts()
    memory: MemoryCounts = MemoryCounts()
    slices: SliceCounts = msgspec.field(default_factory=SliceCounts)
    media: MediaCounts = MediaCounts()
    drafts: DraftCounts = DraftCounts()
    disk: DiskCounts = DiskCounts()
    ranks: RankCounts = RankCounts()
    embeddings: EmbeddingCounts = msgspec.field(default_factory=EmbeddingCounts)
    running: list[RunningRequest] = []
    """The running requests, then the waiting ones, in the order of arrival."""
    ttft_s: float | None = None
    """The time to the first token of the last request that had one."""


class CacheNode(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the trie, and the snapshots of its tokens."""

    id: int
    """The name of the node while it exists; below 2**53."""
    parent: int | None = None
    """The id of the parent; None for a child of a root, which is no node."""
    start: int = 0
    """The tokens from the root to the beginning of the edge."""
    end: int
    bytes: int
    """Live and paged out."""
    live_bytes: int
    """In the buffers of layers. Approximate: buffers have room for further tokens."""
    paged_bytes: int = 0
    layers: int
    """The layers that the model uses."""
    live_layers: int
    paged_layers: int = 0
    missing_layers: int = 0
    """The layers without a snapshot here."""
    idle_uses: int = 0
    """The number of uses of the trie since this node was last used."""
    locks: int
    """The open sessions whose prompts pass through the node."""
    restore_point: bool = False
    stored: int = 0
    """The tokens of the edge, from its beginning, that are on disk."""
    restored: bool = False
    """True if some of it was read from disk."""
    media: int = 0
    """The items of media in the edge's tokens."""
    text: str | None = None
    """The beginning of the edge's text; only if the runner was started with --inspect-text."""


class CachePicture(msgspec.Struct, frozen=True, kw_only=True):
    """The trie at one moment, parents before their children. A very large trie is cut to the nodes used last;
    `CacheCounts` has the number of all nodes."""

    generation: int
    """Differs from an earlier one if anything has changed."""
    kind: str
    nodes: list[CacheNode] = []
