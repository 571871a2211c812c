"""The runner's numbers: the bodies of `GET /v1/stats` and `GET /v1/cache`, also sent as events, and `GET /metrics`.

JSON keys are the names of fields. Counters start at 0 with the process, and never decrease. Units are in the names or
in the docstrings. The annotation of a field is its metric in `/metrics`; the metric's help describes the field.
"""

from typing import Annotated

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """Annotates a field whose number is a further sample of a metric. Another field of the struct has the metric."""

    name: str
    """The name in `/metrics` without `mlx_runner_`, and without the `_total` of counters and the `_info` of texts."""
    of: str
    """The value of the metric's label; for an `Info`, the name of the label."""
    less: str = ""
    """The name of a field of the same struct, whose number is subtracted from this one."""


class Metric(msgspec.Struct, frozen=True):
    """Annotates a field with its metric, and its sample of the metric. For `name`, `of`, `less` see `Sample`."""

    name: str
    help: str
    label: str = ""
    """The label's name. A dict has a sample for each key. A list has a sample for each struct: the struct's field
    `label` is the label's value, its field `of` the number. Without a label, a list has one sample, its length."""
    of: str = ""
    less: str = ""
    per: float = 1
    """The divisor that converts the number to the unit of the metric."""
    before: str = ""
    """The name of the metric before which this one stands in `/metrics`; "" for the order of the fields."""


class Counter(Metric, frozen=True):
    """A number that never decreases."""


class Gauge(Metric, frozen=True):
    """A number that may decrease."""


class Histogram(Metric, frozen=True):
    """A distribution of values."""


class Info(Metric, frozen=True):
    """Texts that never change."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that run or wait now, and the ended requests by outcome. Each request is in one count."""

    running: Annotated[int, Gauge("requests_running", "Requests being computed.")] = 0
    queued: Annotated[int, Gauge("requests_queued", "Requests waiting to be computed.")] = 0
    done: Annotated[
        int, Counter("requests", "Requests that have ended, by outcome.", "outcome", "done", before="requests_running")
    ] = 0
    """Requests whose answer the model, a stop string or a grammar ended."""
    length: Annotated[int, Sample("requests", "length")] = 0
    """Requests whose answer reached the wanted number of tokens, or filled the context."""
    cancelled: Annotated[int, Sample("requests", "cancelled")] = 0
    """Requests whose client closed the connection."""
    failed: Annotated[int, Sample("requests", "failed")] = 0
    """Requests that a fault, a lack of memory, or a grammar that could not be followed to its end has ended."""
    refused: Annotated[int, Sample("requests", "refused")] = 0
    """Requests that could not begin, for example since the body was invalid or the prompt too long."""


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
    """Generated tokens about which a grammar left no choice."""


class ScoreCounts(msgspec.Struct, kw_only=True):
    """The rows of `POST /v1/score` that have begun, and the tokens of their prompts. Each row is a request."""

    rows: Annotated[int, Counter("score_rows", "Requests that were rows of scores.")] = 0
    tokens: Annotated[int, Sample("score_tokens", "computed", less="cached")] = 0
    cached: Annotated[int, Counter("score_tokens", "Prompt tokens of these, by source.", "source", "cache")] = 0


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the prefix cache, and the bytes that it has evicted and restored so far."""

    budget_bytes: Annotated[int | None, Gauge("cache_budget_bytes", "Most bytes that the cache may hold.")] = None
    """None means that there is no limit."""
    held_bytes: int = 0
    """The sum of `live_bytes` and `paged_bytes`."""
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
    """Bytes of snapshots outside the buffers of layers."""
    running_bytes: Annotated[int, Gauge("cache_running_bytes", "The live bytes that running requests use.")] = 0
    checkpoint_bytes: Annotated[int, Gauge("cache_checkpoint_bytes", "The part of the paged bytes in checkpoints.")] = 0
    """Bytes of states, and of windows and other tails."""
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
    """The number of requests that reused less than they share with the cache, or that share nothing, by reason."""


class MemoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device's memory."""

    used_bytes: Annotated[int, Gauge("memory_used_bytes", "Device memory in use.")] = 0
    reusable_bytes: Annotated[int, Gauge("memory_reusable_bytes", "Freed memory that MLX keeps for new arrays.")] = 0
    peak_bytes: Annotated[int, Gauge("memory_peak_bytes", "Most device memory ever in use.")] = 0
    budget_bytes: Annotated[int | None, Gauge("memory_budget_bytes", "Most device memory that may be in use.")] = None
    """None means that there is no limit."""
    weights_bytes: Annotated[
        int, Gauge("memory_weights_bytes", "Memory taken by the weights.", before="memory_budget_bytes")
    ] = 0


class SliceCounts(msgspec.Struct, kw_only=True):
    """The slices that the engine has computed."""

    begin: Annotated[int, Counter("slices", "Slices of computation, by kind.", "kind", "begin")] = 0
    prefill: Annotated[int, Sample("slices", "prefill")] = 0
    encode: Annotated[int, Sample("slices", "encode")] = 0
    """Slices that computed a piece of media."""
    decode: Annotated[int, Sample("slices", "decode")] = 0
    prefill_tokens: Annotated[
        int, Counter("slice_tokens", "Tokens computed in slices, by kind.", "kind", "prefill")
    ] = 0
    decode_rows: Annotated[int, Sample("slice_tokens", "decode")] = 0
    """The sum of the numbers of answers in all decode steps."""
    prefill_s: Annotated[
        float, Counter("slice_seconds", "Time spent in slices, by kind.", "kind", "prefill", before="slice_tokens")
    ] = 0.0
    encode_s: Annotated[float, Sample("slice_seconds", "encode")] = 0.0
    decode_s: Annotated[float, Sample("slice_seconds", "decode")] = 0.0


class MediaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The media of all prompts. All numbers are 0 for a model that takes no media."""

    encoded: Annotated[int, Counter("media_encoded", "Pictures and sounds that went through a tower.")] = 0
    soft_tokens: Annotated[int, Counter("media_tokens", "Tokens that these took in prompts.")] = 0
    encode_s: Annotated[float, Counter("media_seconds", "Time spent in towers.")] = 0.0
    feature_hits: Annotated[int, Counter("media_feature_hits", "Media whose features were still known.")] = 0
    """Media whose features were still in memory, while their keys and values were not."""
    feature_bytes: Annotated[int, Gauge("media_feature_bytes", "Memory taken by features of media.")] = 0
    """Memory for features that are kept for later prompts."""
    row_bytes: Annotated[int, Gauge("media_row_bytes", "Memory taken by rows that wait for a tower.")] = 0


class DraftModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The small model that drafts."""

    name: str
    bytes: int
    """The memory that the model holds beside its weights."""
    state: str
    """`on`, `resting` or `off`, as in `DraftCounts`."""
    why: str


class DraftCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of all answers. A draft has a source: `path` is a conversation in the cache that continues this one;
    `own` is the text of the request; `earlier` is an earlier answer; `model` is a small model; `known` is the first
    token of an answer to the same prompt, which needs no trial."""

    rounds: Annotated[int, Counter("draft_rounds", "Decode steps that tried drafts.")] = 0
    drafted: Annotated[
        dict[str, int], Counter("drafted_tokens", "Tokens that were tried before they were drawn, by source.", "source")
    ] = {}
    accepted: Annotated[
        dict[str, int], Counter("accepted_tokens", "Drafted tokens that were right, by source.", "source")
    ] = {}
    state: str = "off"
    """The state of drafts from known text, for the size of the last batch: `on`, `resting` (drafting was slower than
    plain decoding) or `off`."""
    why: str = ""
    """The reason for `state`."""
    model: DraftModelState | None = None
    """None without a draft model."""


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The disk cache. All numbers are 0 without `--disk-cache`."""

    state: str = "none"
    """`on`, `reading` (writing has stopped), `off` (after an error) or `none` (no disk cache was asked for)."""
    segments: Annotated[int, Gauge("disk_segments", "Files of this model.")] = 0
    held_bytes: Annotated[
        int, Gauge("disk_held_bytes", "Files of all models in the directory of the disk cache.", before="disk_segments")
    ] = 0
    """The bytes of the files of all models, which any process may have written."""
    budget_bytes: Annotated[
        int, Gauge("disk_budget_bytes", "The most that these may take.", before="disk_segments")
    ] = 0
    written_bytes: Annotated[int, Counter("disk_written_bytes", "Bytes written.")] = 0
    """The bytes that this process has written. The counts after this one are also those of this process."""
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
    """The reasons: `torn` (incomplete), `crc`, `tokens` (of another prompt) or `layers` (of another model)."""
    checks: Annotated[
        int, Counter("disk_checks", "Restored segments that were computed again, to compare.", before="disk_rejected")
    ] = 0
    failed_checks: Annotated[
        int, Counter("disk_failed_checks", "Those that were something else.", before="disk_rejected")
    ] = 0
    """After each failed check, all files of this model were removed."""


class EmbeddingCounts(msgspec.Struct, kw_only=True):
    """The texts that were embedded. All numbers are 0 for a model that makes no embeddings."""

    texts: Annotated[int, Counter("embedded_texts", "Texts that were embedded.")] = 0
    tokens: Annotated[int, Counter("embedded_tokens", "Their tokens.")] = 0
    padding: Annotated[int, Counter("embedding_padding_tokens", "Tokens computed beside these, to fill rows.")] = 0
    forwards: Annotated[int, Counter("embedding_forwards", "Forwards over these, each over some of them.")] = 0
    seconds: Annotated[float, Counter("embedding_seconds", "Time spent in these.")] = 0.0
    waiting: Annotated[int, Gauge("embedding_texts_waiting", "Texts that have arrived and are not embedded yet.")] = 0


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has arrived and not ended."""

    number: int
    """The number by which the log names the request."""
    phase: str
    """`queued`, `prefill`, `grammar` (the prompt is computed, but its grammar is not compiled yet) or `decode`."""
    prompt: int
    """The number of tokens of the prompt."""
    cached: int = 0
    restored: int = 0
    """The number of cached tokens that were read from disk for the request."""
    prefilled: int = 0
    """The number of tokens of the prompt that the layers hold, cached tokens included."""
    generated: int = 0
    max_tokens: int = 0
    """The most tokens that the answer may have."""
    age_s: float = 0.0
    """The time since the request arrived."""
    tokens_per_s: float = 0.0
    """Tokens per second in the present phase."""
    ttft_s: float | None = None
    """The time from the arrival to the first token; None before the first token."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank: one of the processes that compute the model together."""

    rank: int
    name: str
    """The rank's number, and its process or address."""
    memory_bytes: int
    """The memory that MLX used on this rank when the rank last reported."""


class RankCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks. All fields are empty or 0 if one process has the whole model."""

    backend: str = ""
    """The library through which ranks exchange data: `ring` or `nccl`."""
    latency_us: Annotated[
        int, Gauge("rank_latency_seconds", "Of a sum of 16 KB over all ranks, at the start.", per=1e6)
    ] = 0
    gbit_s: float = 0.0
    """The speed of a sum of 8 MB over all ranks: gigabits that each rank sends in a second."""
    tape_bytes: Annotated[int, Counter("rank_tape_bytes", "Sent to each follower, so that it computes the same.")] = 0
    members: Annotated[
        list[Rank],
        Gauge(
            "ranks", "Processes that compute the model together; 0 if one has all of it.", before="rank_latency_seconds"
        ),
        Gauge("rank_memory_bytes", "Memory in use by MLX, by rank.", "rank", "memory_bytes"),
    ] = []
    """The leader, which is rank 0, then the followers."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of the runner, taken at one moment between two slices."""

    version: Annotated[str, Info("", "The runner and its model.", of="version")]
    """The version of the runner."""
    model: Annotated[str, Sample("", "model")]
    """The name of the model, for people."""
    path: str = ""
    """The directory of the model; empty for a model from Ollama's store."""
    architecture: Annotated[str, Sample("", "architecture")]
    device: Annotated[str, Sample("", "device")]
    """The kind of device that computes: `gpu` or `cpu`."""
    context_length: Annotated[int, Gauge("context_tokens", "Most tokens that prompt and answer may have together.")]
    parallel: Annotated[int, Gauge("requests_parallel", "Most requests computed at once.")]
    cache_kind: Annotated[str, Sample("", "cache")]
    """The kind of the prefix cache: `trie`, `single` or `none`."""
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
    """The running requests, then the waiting ones, each group in the order of arrival."""
    ttft_s: float | None = None
    """The time to the first token, of the last request that has a first token."""


class CacheNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the trie: its edge, and the snapshots of the edge's tokens."""

    id: int
    """A number below 2**53 that names the node while the node exists."""
    parent: int | None = None
    """The id of the parent; None for a child of a root: a root is not a `CacheNode`."""
    start: int = 0
    """The number of tokens from the root to the beginning of the edge."""
    end: int
    bytes: int
    """The sum of `live_bytes` and `paged_bytes`."""
    live_bytes: int
    """The bytes in the buffers of layers. Approximate, since buffers have room for further tokens."""
    paged_bytes: int = 0
    layers: int
    """The number of layers of the model that have a cache."""
    live_layers: int
    paged_layers: int = 0
    missing_layers: int = 0
    """The number of layers without a snapshot in this node."""
    idle_uses: int = 0
    """The number of uses of the trie since this node was last used."""
    locks: int
    """The number of open sessions whose prompts pass through the node."""
    restore_point: bool = False
    stored: int = 0
    """The number of tokens on disk, counted from the beginning of the edge."""
    restored: bool = False
    """True if a part of the node was read from disk."""
    media: int = 0
    """The number of media items among the edge's tokens."""
    text: str | None = None
    """The beginning of the edge's text; None unless the runner was started with --inspect-text."""


class CachePicture(msgspec.Struct, frozen=True, kw_only=True):
    """The trie at one moment; parents stand before their children. Of a very large trie, only the nodes used last are
    listed. `CacheCounts` has the number of all nodes."""

    generation: int
    """A number that is another one whenever the trie has changed."""
    kind: str
    nodes: list[CacheNode] = []
