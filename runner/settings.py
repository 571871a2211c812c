"""The settings of each command, with the flags that set these settings.

`cli` makes settings from the command line and the environment; all other code only reads them.

A flag is one field of a class. The field's annotation has the line for `--help` and the data for parsers; its docstring
is the full meaning, from which docs/flags.md is made.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from runner.sizes import Bound

DEFAULT_CONTEXT_TOKENS = 32768
"""The context length, in tokens, of a model that does not state one."""
DEFAULT_MAX_GAP_MS = 100
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 128
"""The prompt tokens of one forward. On a CPU, larger chunks are no faster, and much larger ones are slower."""
DTYPES = ("auto", "keep", "float32", "bfloat16", "float16")
"""The values of `--dtype`: the types of floating-point weights."""
HAND_OVER = {
    "auto": "those that this runner refuses to load, and those whose pictures or sounds only Ollama's runner can read",
    "refused": "only those that are refused",
    "off": "none",
}
"""The values of `--hand-over`, each with the models that Ollama's own runner then gets."""
DRAFT_AUTO, DRAFT_OFF = "auto", "off"
"""The values of `--draft` that name no model."""
CACHE_PERCENT = 25
"""The percentage of memory that is kept free of weights for the prefix cache, which uses no more by default."""
MEMORY_PERCENT = 75
"""The default limit for weights, cache and computing together, in percent of the device's memory."""
MOST_RANKS = 64
"""The most ranks of one model."""
DEFAULT_PARALLEL = 4
MOST_PARALLEL = 64
"""The default number of requests that run at the same time, and the most that can."""
CACHE_KINDS = ("trie", "single", "none")
DEFAULT_DRAFT_TOKENS, MOST_DRAFT_TOKENS = 15, 63
"""The most drafts of a round: the default limit, and the highest limit."""
LEAST_SLICE_TOKENS = 16
"""The shortest slice that is worth computing, in tokens: a forward over fewer is hardly cheaper."""

_METAVARS = {bool: "on|off", int: "N", float: "N", Bound: "BYTES|N%", Path: "FILE"}
"""The placeholder of a value in `--help`, by the type of the field, unless the flag has its own."""
ON_OFF = ("on", "off")
VARIABLES = "MLX_RUNNER_"
"""The prefix of the names of all environment variables of this runner."""


class Flag(msgspec.Struct, frozen=True):
    """The ways to set a field: by `--name`, else by an environment variable, else by a default. Attributes that are
    left out follow from the field: a word has its default, and a bool that is off by default is a switch."""

    short: str
    """The line for `--help`. It contains the default in brackets, if `default` does not hold that."""
    group: str
    """The heading of the flag in `--help`."""
    name: str = ""
    """The name of the flag; by default the name of the field, with dashes."""
    metavar: str = ""
    default: str | None = None
    """The default value: shown in `--help`, and parsed like a typed one. None if there is no fixed default."""
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int = 0
    """The least and the highest value of a number."""
    is_switch: bool = False
    """True if the flag without a value means `on`."""

    @property
    def variable(self) -> str:
        """The environment variable that sets the field when the flag is absent."""
        return VARIABLES + self.name.upper().replace("-", "_")


_serving = partial(Flag, group="what to serve")
_caching = partial(Flag, group="memory and cache")
_computing = partial(Flag, group="computing")
_process = partial(Flag, group="process")
_AS_SERVER = "the flag of the field of `Settings` with the same name"


@cache
def flags_of(settings: type[msgspec.Struct]) -> Mapping[str, Flag]:
    """Returns the flags of a command by the names of their fields, in the order of `--help`."""
    found: dict[str, Flag] = {}
    for field in msgspec.structs.fields(settings):
        for mark in get_args(field.type)[1:]:
            if mark is _AS_SERVER:
                found[field.name] = flags_of(Settings)[field.name]
            elif isinstance(mark, Flag):
                found[field.name] = _completed(mark, field)
    return found


def _completed(flag: Flag, field: msgspec.structs.FieldInfo) -> Flag:
    kind = field_kind(field)
    is_switch = field.default is False
    default = "off" if is_switch else field.default if isinstance(field.default, str) else flag.default
    return msgspec.structs.replace(
        flag,
        name=flag.name or field.name.replace("_", "-"),
        metavar=flag.metavar or _METAVARS[kind],
        default=default,
        choices=ON_OFF if kind is bool else flag.choices,
        is_switch=is_switch,
    )


def field_kind(field: msgspec.structs.FieldInfo) -> type:
    """Returns the declared type of a flag's field, without None."""
    declared: type = get_args(field.type)[0]
    kinds: tuple[type, ...] = get_args(declared) or (declared,)
    return kinds[0]


Start = Literal["descriptor", "symlink"]
"""The ways to start Ollama so that it finds the shim afterwards (runner/ollama/launcher.py)."""


class OllamaRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Ollama's own runner, in whose place `mlx-runner ollama serve` lets the host start this one."""

    command: tuple[str, ...]
    """Ollama's executable and the arguments that the host gave its runner."""
    environ: Mapping[str, str]
    """The environment that the host gave its runner."""
    libraries: Path | None = None
    """Ollama's `lib/ollama`, with its MLX libraries; None if it has none."""
    media: frozenset[str] = frozenset()
    """The packages of Ollama's sources for whose models it takes pictures or sound."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a server. Names hold the units; the texts below fields with flags are about the flags."""

    model: Annotated[str, _serving("a model in the Ollama store, or a directory", metavar="NAME|DIR")]
    """A model in the Ollama store (`llama3.2`, `me/mine:q4`), or a Hugging Face style directory."""
    port: Annotated[int, _serving("TCP port on 127.0.0.1; 0 picks a free one", default="0", least=0, most=65535)]
    """The TCP port on 127.0.0.1; 0 picks a free one, which the log shows."""
    models_dir: Annotated[Path, _serving("the Ollama store [$OLLAMA_MODELS, ~/.ollama/models]", metavar="DIR")]
    """The Ollama store; default: $OLLAMA_MODELS, else ~/.ollama/models, else the store of the Linux service."""
    context_tokens: Annotated[
        int | None,
        _serving(
            "longest prompt and answer together [the model's own]",
            metavar="TOKENS",
            name="context",
            least=2,
            most=1 << 30,
        ),
    ] = None
    """The most tokens that prompt and answer may have together, and the context length reported to hosts; default: the
    model's own length, which cannot be exceeded, or 32768 if its config.json gives none."""
    verify: Annotated[bool, _serving("verify the SHA-256 of every blob before loading")] = False
    """Verify the SHA-256 of every blob of the model before loading it, which takes a second or two per gigabyte; sizes
    are always verified."""
    memory: Annotated[Bound, _caching("limit for weights, cache and working memory", default=f"{MEMORY_PERCENT}%")] = (
        Bound(percent=MEMORY_PERCENT)
    )
    """The limit for everything together: weights, keys and values, the prefix cache, and the memory that computing
    needs; an amount (`24G`), or a share of the device's memory (on CPUs, of what is available at the start); unused
    cache entries are evicted first, then new requests wait, and a request that can never fit is refused."""
    cache: Annotated[
        str, _caching("conversations kept: many (trie), single, none", metavar="KIND", choices=CACHE_KINDS)
    ] = "trie"
    """`trie` keeps many conversations, stores what they share once, and reuses the longest prefix that a new prompt has
    in common with any of them; `single` keeps only the last conversation; `none` keeps nothing and computes every
    prompt in full."""
    cache_memory: Annotated[
        Bound, _caching("prefix cache limit: the smaller of both", default=f"8GiB,{CACHE_PERCENT}%")
    ] = Bound()
    """The limit for the prefix cache, conversations in use included: an amount (`512MiB`, `8G`; K, M, G and T are
    powers of 1024), a share of the device's memory, or both: the smaller counts; a new request waits until it
    fits beside the running ones, whose answers may grow past the limit; with 0, nothing is kept between requests, and
    they run one at a time."""
    disk_cache: Annotated[Path | None, _caching("keep conversations on disk, with their prompts", metavar="DIR")] = None
    """A directory in which conversations are kept, so that they survive the process: prompts are then on disk, readable
    for whoever may read your files; see docs/disk.md."""
    disk_memory: Annotated[Bound, _caching("disk cache limit: the smaller of both", default="16GiB,25%")] = Bound(
        16 << 30, 25
    )
    """The limit for everything in the directory of --disk-cache, of all models: an amount, a share of what is free on
    its volume at the start, or both: the smaller counts."""
    kv_bits: Annotated[
        int | None,
        _caching(
            "quantize keys and values [$OLLAMA_KV_CACHE_TYPE, off]",
            metavar="BITS",
            choices=("8", "6", "5", "4", "3", "off"),
        ),
    ] = None
    """Quantize keys and values from the first token on, to BITS bits per number on average, in place of 16 (32 on
    most CPUs); docs/cache.md says what that saves and costs; layers that cannot be quantized stay as they are, and the
    log says why; default: as $OLLAMA_KV_CACHE_TYPE says (`q8_0`, `q4_0`), else off."""
    parallel: Annotated[
        int, _computing(f"requests that run at once [$OLLAMA_NUM_PARALLEL, {DEFAULT_PARALLEL}]", most=MOST_PARALLEL)
    ] = DEFAULT_PARALLEL
    """The number of requests that run at once, at most 64; others wait in order of arrival; `--cache single` and
    `--cache none` always run one at a time; default: $OLLAMA_NUM_PARALLEL, else 4."""
    max_gap_s: Annotated[
        float,
        _computing(
            "longest pause while other prompts are read",
            name="max-gap-ms",
            default=str(DEFAULT_MAX_GAP_MS),
            most=60_000,
        ),
    ] = DEFAULT_MAX_GAP_MS / 1000
    """The longest pause between two tokens of a running answer while other prompts are read, in milliseconds; a larger
    value reads prompts faster, a smaller one lets answers flow more evenly; a pause always lasts as long as the model
    takes for one token of every running answer and 16 tokens of a prompt."""
    ranks_here: Annotated[
        int, _computing("processes to split the model over, one per GPU", name="ranks", default="1", most=MOST_RANKS)
    ] = 1
    """Split the model over N processes on this machine, one for each NVIDIA GPU; `mlx-runner check` says which models
    can be split; excludes --disk-cache, --record, pictures and draft models; see docs/ranks.md."""
    followers: Annotated[
        tuple[str, ...], _computing("machines to split the model over: HOST:PORT,...", metavar="ADDRESSES")
    ] = ()
    """Split the model over this machine and others, each of which runs `mlx-runner follow`: the addresses HOST:PORT at
    which they listen, separated by commas; needs --secret-file, and excludes what --ranks excludes; see
    docs/ranks.md."""
    secret_file: Annotated[Path | None, _computing("file with the secret that these machines share")] = None
    """The file with the secret by which machines that share a model recognize each other: at least 16 bytes, the same
    on all machines, readable by its owner only."""
    prefill_chunk_tokens: Annotated[
        int | None,
        _computing(
            f"prompt tokens at a time [{GPU_CHUNK_TOKENS} on GPUs, {CPU_CHUNK_TOKENS} on CPUs]",
            metavar="TOKENS",
            name="prefill-chunk",
            most=1 << 20,
        ),
    ] = None
    """Prompt tokens per forward pass while no other answer is being generated; a cancelled request ends between two
    passes; default: 2048 on GPUs, 128 on CPUs."""
    draft: Annotated[str, _computing("draft from repeated text, or by a small model", metavar="off|NAME|DIR")] = (
        DRAFT_AUTO
    )
    """Whether several tokens are tried in one step, which leaves answers the same: `auto` tries those that followed the
    same text earlier in the request or in another answer, and those that the model's own head, or the draft model
    stored beside it, suggests, as long as that is faster; the name or directory of a small model with the same
    vocabulary makes that model draft; `off` tries none."""
    draft_tokens: Annotated[
        int, _computing(f"most drafted tokens a step [{DEFAULT_DRAFT_TOKENS}]", most=MOST_DRAFT_TOKENS)
    ] = DEFAULT_DRAFT_TOKENS
    """The most tokens drafted in one step, at most 63; a request may set less with the option `draft_num_predict`;
    default: 15."""
    dtype: Annotated[str, _computing("weights: keep, float32, bfloat16, float16", metavar="TYPE", choices=DTYPES)] = (
        "auto"
    )
    """The type of floating-point weights, and thereby of keys and values: `keep` leaves the weights as they are stored;
    `float32`, `bfloat16` and `float16` convert them while loading, and float32 takes twice the memory of 16 bits, in
    the prefix cache too; `auto` is `keep` on GPUs and, if memory allows, `float32` on CPUs, which are many times slower
    with 16-bit numbers; the scales of quantized weights are converted like all others, and the weights stay
    quantized."""
    blas: Annotated[str, _computing("a faster BLAS for MLX on Linux CPUs", metavar="auto|off|PATH")] = "auto"
    """The BLAS that replaces MLX's own on Linux CPUs: the fastest one installed, none, or the CBLAS library at PATH."""
    kernels: Annotated[
        str, _computing("faster kernels for MLX on Linux CPUs", metavar="auto|off", choices=("auto", "off"))
    ] = "auto"
    """The kernels that replace MLX's own on Linux CPUs, for packed weights, attention and elementwise functions: those
    for the vectors of this processor, or none."""
    blas_threads: Annotated[
        int | None, _computing("threads of the BLAS and the kernels", metavar="auto|N", default="auto", most=1024)
    ]
    """Threads of that BLAS and of the kernels: `auto` takes all physical cores that this process may use for prompts,
    and up to four of them for answers while no other program wants them; N takes N for both."""
    no_media: Annotated[bool, _computing("serve text only; requests with media are refused")] = False
    """Do not load the towers, the parts of a model that read pictures and sound, which saves their memory; requests
    with pictures or sound are refused."""
    unproven_models: Annotated[bool, _computing("serve models of mlx-vlm that may answer wrong")] = False
    """Also serve models of mlx-vlm, if it is installed, whose answers were not compared with its own: they may be wrong
    without an error."""
    inspect_text: Annotated[bool, _process("show the beginnings of prompts on the page")] = False
    """Show the beginnings of prompts in `/v1/cache` and on the page, to every user of this machine; otherwise both show
    only numbers of tokens and bytes."""
    watch_parent: Annotated[bool, _process("exit when the parent exits [on under Ollama]")]
    """Exit when the parent process has ended; default: on if started as a host does (`mlx-runner runner ...`), else
    off."""
    hand_over: Annotated[
        str, _process("models to leave to Ollama's own runner", metavar="WHICH", choices=(*HAND_OVER,))
    ] = "auto"
    """Which models Ollama's own runner takes over under `mlx-runner ollama serve`: `auto`, every model that this runner
    refuses to load, and models whose pictures or sounds only Ollama's runner can read; `refused`, only models that are
    refused; `off`, none; elsewhere this flag has no effect."""
    log_level: Annotated[
        int,
        _process(
            "trace, debug, info, warn, error [$OLLAMA_DEBUG, info]",
            metavar="LEVEL",
            choices=("trace", "debug", "info", "warn", "error"),
        ),
    ]
    """The least severe level that is logged: trace, debug, info, warn or error; default: as $OLLAMA_DEBUG says, else
    info."""
    trace: Annotated[Path | None, _process("record where time goes, for ui.perfetto.dev")] = None
    """Record what every slice of computation spends its time on, for https://ui.perfetto.dev or chrome://tracing."""
    record: Annotated[Path | None, _process("record requests, for `mlx-runner replay FILE`")] = None
    """Record all requests with their prompts and answers, and everything that decides how they are computed:
    `mlx-runner replay FILE` computes them again; if FILE exists, the recording is FILE.2, and so on; excludes pictures
    and --disk-cache; see docs/replay.md."""
    verbose: Annotated[bool, _process("ignored; Ollama sends it")] = False
    """Accepted because hosts send it; has no effect."""
    ranks: int = 1
    """The processes that compute the model together, on this machine and on others."""
    hosted: bool = False
    """True if a host started the process, False if a person did."""
    ollama: OllamaRunner | None = None
    """The runner to hand over to; None without `mlx-runner ollama serve`."""
    warnings: tuple[str, ...] = ()
    """Environment variables that are ignored, and why; for the log."""


def context_limit(own_tokens: int, wanted_tokens: int | None) -> int:
    """Returns the most tokens of a context: never more than `own_tokens`, the model's own limit (0: not stated)."""
    if own_tokens <= 0:
        return wanted_tokens or DEFAULT_CONTEXT_TOKENS
    return min(own_tokens, wanted_tokens or own_tokens)


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner ollama serve`."""

    ollama: str | None = None
    """The name or path of Ollama's executable; None: `ollama`, from PATH."""
    words: Sequence[str] = ("serve",)
    """Ollama's arguments."""
    runner: str | None = None
    """The command of another runner, as a shell would read it; None: this runner's."""
    start: Start | None = None
    """None: as suits this system."""


class TopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner top`."""

    url: Annotated[
        str,
        Flag(
            "the runner's port on 127.0.0.1, instead of URL",
            group="on this machine",
            name="port",
            metavar="N",
            most=65535,
        ),
    ]
    """The runner's address: `http://host:port`."""
    once: Annotated[bool, Flag("print the current numbers and exit", group="output")] = False
    """Print the current numbers and exit, as happens without a terminal."""
    log_level: int


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner replay`."""

    file: Path
    model: Annotated[str | None, Flag("the model, if it is elsewhere now", group="model", metavar="NAME|DIR")] = None
    """The name or the directory of the model, if it is not the recorded one."""
    models_dir: Annotated[Path, _AS_SERVER]
    log_level: Annotated[int, _AS_SERVER]


class FollowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner follow`."""

    address: Annotated[
        str, _computing("address at which leaders reach this machine", name="listen", metavar="ADDRESS:PORT")
    ]
    """The IPv4 address of this machine on one private network."""
    port: int
    """0 picks a free one, which the log shows."""
    models_dir: Annotated[Path, _AS_SERVER]
    secret_file: Annotated[Path, _AS_SERVER]
    log_level: Annotated[int, _AS_SERVER]


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner check`."""

    model: str
    models_dir: Annotated[Path, _AS_SERVER]
    context_tokens: Annotated[int | None, _AS_SERVER] = None
    verify: Annotated[bool, _serving("verify every blob, and try the model on this device")] = False
    """Verify the SHA-256 of every blob of the model; then load it, which takes time and memory as serving does, and try
    on this device whether its answers may be computed together and drafted."""
    format: Annotated[Path | None, _serving("compile the JSON schema in FILE, as for a request [none]")] = None
    """A file with a JSON schema, or with any other `Format`, as JSON; `-` is standard input. It
    is compiled for the model as for a request, and reported as enforced, as enforced in part with the first part that
    is left out, or as refused, with the message that a client would get; then the exit status is 1."""
    memory: Annotated[Bound, _AS_SERVER] = Bound(percent=MEMORY_PERCENT)
    disk_cache: Annotated[Path | None, _AS_SERVER] = None
    draft: Annotated[str, _AS_SERVER] = DRAFT_AUTO
    """As in `Settings`; with DRAFT_OFF, what DRAFT_AUTO would do is reported too."""
    dtype: Annotated[str, _AS_SERVER] = "auto"
    unproven_models: Annotated[bool, _AS_SERVER] = False
    blas: Annotated[str, _AS_SERVER] = "auto"
    kernels: Annotated[str, _AS_SERVER] = "auto"
    blas_threads: Annotated[int | None, _AS_SERVER] = None
    log_level: Annotated[int, _AS_SERVER]
    json: Annotated[bool, Flag("print JSON instead of a table", group="output")] = False
    """Print one JSON object instead of the table; sizes are in bytes."""
