"""The command line as a table: one row a flag, from which the parser, `--help` and the README are made."""

import msgspec

from runner.cache import CACHE_KINDS
from runner.engine.policy import LEAST_TOKENS
from runner.settings import (
    CACHE_PERCENT,
    CPU_CHUNK_TOKENS,
    DEFAULT_CONTEXT_TOKENS,
    DEFAULT_MAX_GAP_MS,
    DEFAULT_PARALLEL,
    DTYPES,
    GPU_CHUNK_TOKENS,
    HAND_OVER,
    MEMORY_PERCENT,
)


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag. `default` is shown and used as text, as if it had been typed; None means that there is none."""

    name: str
    metavar: str = ""
    default: str | None = None
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    """Whether the flag alone means `on`."""
    short: str
    """For `--help`: a line, with the default in brackets where `default` does not say it."""
    help: str
    """For the README: all of it."""
    group: str

    @property
    def variable(self) -> str:
        """The environment variable that sets the same thing when the flag is absent."""
        return "MLX_RUNNER_" + self.name.upper().replace("-", "_")


class Command(msgspec.Struct, frozen=True):
    """A first word by which the program does something else than to serve a model."""

    name: str
    words: str
    """What may stand behind it."""
    short: str


COMMANDS = (
    Command("check", "NAME|DIR", "what a model is, and all that is wrong with it"),
    Command("top", "[--port N | URL]", "watch a runner from another terminal"),
    Command("completion", "SHELL", "for your shell: source <(mlx-runner completion bash)"),
    Command("version", "", "of the runner and of what it stands on"),
)


def _switch(group: str, name: str, short: str, meaning: str) -> Flag:
    return Flag(
        group=group,
        name=name,
        metavar="on|off",
        default="off",
        choices=ON_OFF,
        is_switch=True,
        short=short,
        help=meaning,
    )


ON_OFF = ("on", "off")
MODEL, CACHE, USERS, COMPUTE, PROCESS = (
    "what to serve",
    "memory and cache",
    "several users at once",
    "computing",
    "process",
)
MOST_PARALLEL = 64

FLAGS = (
    Flag(
        group=MODEL,
        name="model",
        metavar="NAME|DIR",
        short="a model of the Ollama store, or a directory",
        help="a model of the Ollama store (`llama3.2`, `me/mine:q4`) or a Hugging Face style directory",
    ),
    Flag(
        group=MODEL,
        name="port",
        metavar="N",
        default="0",
        short="on 127.0.0.1; 0 takes a free one",
        help="TCP port on 127.0.0.1; 0 takes a free one and logs it",
    ),
    Flag(
        group=MODEL,
        name="models-dir",
        metavar="DIR",
        short="the Ollama store [$OLLAMA_MODELS, ~/.ollama/models]",
        help="the Ollama store; default: $OLLAMA_MODELS, else ~/.ollama/models, else that of a Linux service",
    ),
    Flag(
        group=MODEL,
        name="context",
        metavar="TOKENS",
        short="most of prompt and answer together [the model's own]",
        help="the most that prompt and answer may have together, and the length that hosts are told; default: the"
        f" model's own length, which cannot be exceeded, or {DEFAULT_CONTEXT_TOKENS} where its config.json names none",
    ),
    _switch(
        MODEL,
        "verify",
        "compare every blob with its SHA-256 before loading",
        "compare the SHA-256 of every blob of the store with its name before loading: a second or two a gigabyte; sizes"
        " are always compared",
    ),
    Flag(
        group=CACHE,
        name="memory",
        metavar="BYTES|N%",
        default=f"{MEMORY_PERCENT}%",
        short="for everything: weights, cache and computing",
        help="the most that everything together takes: weights, keys and values, what the cache keeps, and what"
        " computing needs meanwhile; `24G`, or a share of the memory that the device lends, on CPUs of what the machine"
        " has available at the start; what nobody uses goes, a request waits, and what can never fit is refused",
    ),
    Flag(
        group=CACHE,
        name="cache",
        metavar="trie|single|none",
        default="trie",
        choices=CACHE_KINDS,
        short="keep many conversations, the last one, or none",
        help="`trie` keeps many conversations, what they have in common once, and reuses the longest prefix that the"
        " next prompt shares with any of them; `single` keeps the last conversation only; `none` computes every prompt"
        " anew",
    ),
    Flag(
        group=CACHE,
        name="cache-memory",
        metavar="BYTES|N%",
        default=f"8GiB,{CACHE_PERCENT}%",
        short="of that for the cache, the smaller of both",
        help="the most that the trie holds, conversations in use included: `512MiB`, `8G` (K, M, G, T count in 1024) or"
        " a share of the memory that the device lends; of both, the smaller counts; a request waits for room beside"
        " those that run, whose answers may outgrow it; 0 keeps nothing between requests, which run one by one",
    ),
    Flag(
        group=CACHE,
        name="kv-bits",
        metavar="8|4|off",
        choices=("8", "4", "off"),
        short="quantize keys and values [$OLLAMA_KV_CACHE_TYPE, off]",
        help="quantize keys and values from the first token on: about half or a quarter of their memory; layers that"
        " cannot stay as they are, and the log says why; default: what $OLLAMA_KV_CACHE_TYPE (`q8_0`, `q4_0`) asks for,"
        " else off",
    ),
    Flag(
        group=USERS,
        name="parallel",
        metavar="N",
        short=f"requests that run at once [$OLLAMA_NUM_PARALLEL, {DEFAULT_PARALLEL}]",
        help=f"the most requests that run at once, up to {MOST_PARALLEL}; others wait in the order of their arrival;"
        " `--cache single` and `none` run one, whatever this says; default: $OLLAMA_NUM_PARALLEL, else"
        f" {DEFAULT_PARALLEL}",
    ),
    Flag(
        group=USERS,
        name="max-gap-ms",
        metavar="N",
        default=str(DEFAULT_MAX_GAP_MS),
        short="prompts of others hold up an answer no longer",
        help="the longest that a running answer is held up between two tokens while prompts of others are read, in"
        " milliseconds: more lets prompts through faster, less lets answers flow more evenly; never less than one"
        f" token of every running answer and {LEAST_TOKENS} of a prompt take on the model at hand",
    ),
    Flag(
        group=COMPUTE,
        name="prefill-chunk",
        metavar="TOKENS",
        short=f"of a prompt at a time [{GPU_CHUNK_TOKENS} on GPUs, {CPU_CHUNK_TOKENS} on CPUs]",
        help="prompt tokens per forward while nobody else's answer is written; a cancelled request is noticed between"
        f" two of them; default: {GPU_CHUNK_TOKENS} on GPUs, {CPU_CHUNK_TOKENS} on CPUs",
    ),
    Flag(
        group=COMPUTE,
        name="dtype",
        metavar="|".join(DTYPES),
        default="auto",
        choices=DTYPES,
        short="of floating-point weights",
        help="the type of floating-point weights, and with them of keys and values: `keep` leaves them as the model has"
        " them; the others convert them while they are loaded, float32 at twice the memory of 16 bits, for the prefix"
        " cache too; `auto` is `keep` on GPUs, and `float32` on CPUs, which are many times slower with 16-bit numbers,"
        " where memory allows; packed weights stay packed, their scales and all norms are converted",
    ),
    Flag(
        group=COMPUTE,
        name="blas",
        metavar="auto|off|PATH",
        default="auto",
        short="a faster BLAS for MLX on Linux CPUs",
        help="the BLAS in front of MLX's own on Linux CPUs: the fastest one found, none, or a CBLAS library",
    ),
    Flag(
        group=COMPUTE,
        name="blas-threads",
        metavar="N",
        default="1",
        short="threads of that BLAS",
        help="threads of that BLAS; more help only large models on idle machines",
    ),
    Flag(
        group=COMPUTE,
        name="one-core",
        metavar="auto|off",
        default="auto",
        choices=("auto", "off"),
        short="one core for the engine, where that is faster",
        help="`auto` keeps the engine's two threads on one core on Linux CPUs where answers come faster so, which it"
        " finds out as they are written, and as long as nobody else wants that core: waking another one can cost more"
        " than a small model's kernels; `off` leaves them to the system",
    ),
    _switch(
        PROCESS,
        "inspect-text",
        "show the beginnings of prompts on the page",
        "show the beginnings of prompts in `/v1/cache` and on the page, to every user of this machine; without it they"
        " tell of tokens and bytes only",
    ),
    Flag(
        group=PROCESS,
        name="watch-parent",
        metavar="on|off",
        choices=ON_OFF,
        short="exit with the parent process [on for hosts]",
        help="exit when the process that started this one is gone; default: on when started as a host does"
        " (`mlx-runner runner ...`), else off",
    ),
    Flag(
        group=PROCESS,
        name="hand-over",
        metavar="|".join(HAND_OVER),
        default=HAND_OVER[0],
        choices=HAND_OVER,
        short="what Ollama's own runner takes over",
        help="what Ollama's own runner takes over where `scripts/ollama-serve` has put this one in its place: `auto`,"
        " every model that this one refuses to load, and those with pictures or sound that only Ollama's can take;"
        " `refused`, the former alone; `off`, none; changes nothing elsewhere",
    ),
    Flag(
        group=PROCESS,
        name="log-level",
        metavar="trace|debug|info|warn|error",
        choices=("trace", "debug", "info", "warn", "error"),
        short="what to log [info, or as $OLLAMA_DEBUG says]",
        help="default: info, or what $OLLAMA_DEBUG asks for",
    ),
    Flag(
        group=PROCESS,
        name="trace",
        metavar="FILE",
        short="where the time goes, for https://ui.perfetto.dev",
        help="write what every slice of computation spends its time on, for https://ui.perfetto.dev or chrome://tracing",
    ),
    _switch(PROCESS, "verbose", "changes nothing; hosts send it", "accepted because hosts send it; changes nothing"),
)

_CHECKED = ("models-dir", "context", "verify", "log-level", "dtype", "memory", "blas", "blas-threads")

CHECK_FLAGS = (
    *(flag for flag in FLAGS if flag.name in _CHECKED),
    _switch(
        "output", "json", "one JSON object in place of the table", "print one JSON object in place of the table; bytes"
    ),
)
"""The flags of `mlx-runner check`."""

TOP_FLAGS = (
    Flag(
        group="where",
        name="port",
        metavar="N",
        short="its port on 127.0.0.1, in place of URL",
        help="its port on 127.0.0.1, in place of URL; its log tells it (`listening url=...`), and `ps` does",
    ),
    _switch(
        "output",
        "once",
        "print the numbers of this moment and exit",
        "print the numbers of this moment and exit, as without a terminal",
    ),
)
"""The flags of `mlx-runner top`."""
