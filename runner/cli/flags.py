"""The table of flags, from which the parsers, `--help` and the documentation are made."""

from runner.cache import CACHE_KINDS
from runner.cli.flag import ON_OFF, Flag, switch
from runner.drafts.policy import CPU_TOKENS, GPU_TOKENS
from runner.engine.policy import LEAST_TOKENS
from runner.settings import (
    CACHE_PERCENT,
    CPU_CHUNK_TOKENS,
    DEFAULT_CONTEXT_TOKENS,
    DEFAULT_MAX_GAP_MS,
    DEFAULT_PARALLEL,
    DRAFT_AUTO,
    DTYPES,
    GPU_CHUNK_TOKENS,
    HAND_OVER,
    MEMORY_PERCENT,
    MOST_PARALLEL,
)

MODEL, CACHE, COMPUTE, PROCESS = "what to serve", "memory and cache", "computing", "process"

FLAGS = (
    Flag(
        group=MODEL,
        name="model",
        metavar="NAME|DIR",
        short="a model in the Ollama store, or a directory",
        help="a model in the Ollama store (`llama3.2`, `me/mine:q4`), or a Hugging Face style directory",
    ),
    Flag(
        group=MODEL,
        name="port",
        metavar="N",
        default="0",
        short="TCP port on 127.0.0.1; 0 picks a free one",
        help="the TCP port on 127.0.0.1; 0 picks a free one, which the log shows",
    ),
    Flag(
        group=MODEL,
        name="models-dir",
        metavar="DIR",
        short="the Ollama store [$OLLAMA_MODELS, ~/.ollama/models]",
        help="the Ollama store; default: $OLLAMA_MODELS, else ~/.ollama/models, else the store of the Linux service",
    ),
    Flag(
        group=MODEL,
        name="context",
        metavar="TOKENS",
        short="longest prompt and answer together [the model's own]",
        help="the most tokens that prompt and answer may have together, and the context length reported to hosts;"
        f" default: the model's own length, which cannot be exceeded, or {DEFAULT_CONTEXT_TOKENS} if its config.json"
        " gives none",
    ),
    switch(
        MODEL,
        "verify",
        "verify the SHA-256 of every blob before loading",
        "verify the SHA-256 of every blob of the model before loading it, which takes a second or two per gigabyte;"
        " sizes are always verified",
    ),
    Flag(
        group=CACHE,
        name="memory",
        metavar="BYTES|N%",
        default=f"{MEMORY_PERCENT}%",
        short="limit for weights, cache and working memory",
        help="the limit for everything together: weights, keys and values, the prefix cache, and the memory that"
        " computing needs; an amount (`24G`), or a share of the device's memory (on CPUs, of what is available at the"
        " start); unused cache entries are evicted first, then new requests wait, and a request that can never fit is"
        " refused",
    ),
    Flag(
        group=CACHE,
        name="cache",
        metavar="KIND",
        default="trie",
        choices=CACHE_KINDS,
        short="conversations kept: many (trie), single, none",
        help="`trie` keeps many conversations, stores what they share once, and reuses the longest prefix that a new"
        " prompt has in common with any of them; `single` keeps only the last conversation; `none` keeps nothing and"
        " computes every prompt in full",
    ),
    Flag(
        group=CACHE,
        name="cache-memory",
        metavar="BYTES|N%",
        default=f"8GiB,{CACHE_PERCENT}%",
        short="prefix cache limit; the smaller counts",
        help="the limit for the prefix cache, conversations in use included: an amount (`512MiB`, `8G`; K, M, G and T"
        " are powers of 1024), a share of the device's memory, or both, of which the smaller counts; a new request"
        " waits until it fits beside the running ones, whose answers may grow past the limit; with 0, nothing is kept"
        " between requests, and they run one at a time",
    ),
    Flag(
        group=CACHE,
        name="disk-cache",
        metavar="DIR",
        short="also keep the prefix cache in this directory",
        help="a directory in which conversations are kept, so that they survive the process: prompts are then on disk,"
        " readable for whoever may read your files; see docs/disk.md",
    ),
    Flag(
        group=CACHE,
        name="disk-memory",
        metavar="BYTES|N%",
        default="16GiB,25%",
        short="disk cache limit; the smaller counts",
        help="the limit for everything in the directory of --disk-cache, of all models: an amount, a share of what is"
        " free on its volume at the start, or both, of which the smaller counts",
    ),
    Flag(
        group=CACHE,
        name="kv-bits",
        metavar="8|4|off",
        choices=("8", "4", "off"),
        short="quantize keys and values [$OLLAMA_KV_CACHE_TYPE, off]",
        help="quantize keys and values to 8 or 4 bits from the first token on, which takes about half or a quarter of"
        " their memory; layers that cannot be quantized stay as they are, and the log says why; default: as"
        " $OLLAMA_KV_CACHE_TYPE says (`q8_0`, `q4_0`), else off",
    ),
    Flag(
        group=COMPUTE,
        name="parallel",
        metavar="N",
        short=f"requests that run at once [$OLLAMA_NUM_PARALLEL, {DEFAULT_PARALLEL}]",
        help=f"the number of requests that run at once, at most {MOST_PARALLEL}; others wait in order of arrival;"
        " `--cache single` and `--cache none` always run one at a time; default: $OLLAMA_NUM_PARALLEL, else"
        f" {DEFAULT_PARALLEL}",
    ),
    Flag(
        group=COMPUTE,
        name="max-gap-ms",
        metavar="N",
        default=str(DEFAULT_MAX_GAP_MS),
        short="longest pause while other prompts are read",
        help="the longest pause between two tokens of a running answer while other prompts are read, in milliseconds;"
        " a larger value reads prompts faster, a smaller one lets answers flow more evenly; a pause always lasts as"
        f" long as the model takes for one token of every running answer and {LEAST_TOKENS} tokens of a prompt",
    ),
    Flag(
        group=COMPUTE,
        name="ranks",
        metavar="N",
        default="1",
        short="processes to split the model over, one per GPU",
        help="split the model over N processes on this machine, one for each NVIDIA GPU; `mlx-runner check` says which"
        " models can be split; excludes --disk-cache, --record, pictures and draft models; see docs/ranks.md",
    ),
    Flag(
        group=COMPUTE,
        name="followers",
        metavar="ADDRESSES",
        short="machines to split the model over: HOST:PORT,...",
        help="split the model over this machine and others, each of which runs `mlx-runner follow`: the addresses"
        " HOST:PORT at which they listen, separated by commas; needs --secret-file, and excludes what --ranks excludes;"
        " see docs/ranks.md",
    ),
    Flag(
        group=COMPUTE,
        name="secret-file",
        metavar="FILE",
        short="file with the secret that these machines share",
        help="the file with the secret by which machines that share a model recognize each other: at least 16 bytes,"
        " the same on all machines, readable by its owner only",
    ),
    Flag(
        group=COMPUTE,
        name="prefill-chunk",
        metavar="TOKENS",
        short=f"prompt tokens at a time [{GPU_CHUNK_TOKENS} on GPUs, {CPU_CHUNK_TOKENS} on CPUs]",
        help="prompt tokens per forward pass while no other answer is being generated; a cancelled request ends between"
        f" two passes; default: {GPU_CHUNK_TOKENS} on GPUs, {CPU_CHUNK_TOKENS} on CPUs",
    ),
    Flag(
        group=COMPUTE,
        name="draft",
        metavar="off|NAME|DIR",
        default=DRAFT_AUTO,
        short="draft from repeated text, or by a small model",
        help="whether several tokens are tried in one step, which leaves answers the same: `auto` tries those that"
        " followed the same text earlier in the request or in another answer, and those that the model's own head, or"
        " the draft model stored beside it, suggests, as long as that is faster; the name or directory of a small model"
        " with the same vocabulary makes that model draft; `off` tries none",
    ),
    Flag(
        group=COMPUTE,
        name="draft-tokens",
        metavar="N",
        short=f"most drafted tokens a step [{GPU_TOKENS} on GPUs, {CPU_TOKENS} on CPUs]",
        help="the most tokens drafted in one step, at most 63; a request may set less with the option"
        f" `draft_num_predict`; default: {GPU_TOKENS} on GPUs, {CPU_TOKENS} on CPUs",
    ),
    switch(
        COMPUTE,
        "draft-known",
        "reuse a greedy answer that the prefix cache has",
        "take the tokens of an answer from the prefix cache as far as the same prompt was answered before, and compute"
        " only what follows; for requests at temperature 0 without penalties, log-probabilities or a format; needs"
        " `--cache trie`",
    ),
    Flag(
        group=COMPUTE,
        name="dtype",
        metavar="TYPE",
        default="auto",
        choices=DTYPES,
        short="weights: keep, float32, bfloat16, float16",
        help="the type of floating-point weights, and thereby of keys and values: `keep` leaves the weights as they are"
        " stored; `float32`, `bfloat16` and `float16` convert them while loading, and float32 takes twice the memory"
        " of 16 bits, in the prefix cache too; `auto` is `keep` on GPUs and, if memory allows, `float32` on CPUs,"
        " which are many times"
        " slower with 16-bit numbers; the scales of quantized weights are converted like all others, and the weights"
        " stay quantized, except with `auto` on CPUs with a fast BLAS: there as many layers as fit into"
        " `--memory` are unpacked into float32, for 4 to 8 times their memory and many times the speed",
    ),
    Flag(
        group=COMPUTE,
        name="blas",
        metavar="auto|off|PATH",
        default="auto",
        short="a faster BLAS for MLX on Linux CPUs",
        help="the BLAS that replaces MLX's own on Linux CPUs: the fastest one installed, none, or the CBLAS library at"
        " PATH",
    ),
    Flag(
        group=COMPUTE,
        name="blas-threads",
        metavar="auto|N",
        default="auto",
        short="threads of that BLAS",
        help="threads of that BLAS: `auto` takes all physical cores that this process may use for prompts, and one for"
        " answers, whose speed depends on memory alone; N takes N for both",
    ),
    switch(
        COMPUTE,
        "no-media",
        "serve text only; requests with pictures are refused",
        "do not load the tower, the part of a model that reads pictures, which saves its memory; requests with pictures"
        " are refused",
    ),
    switch(
        PROCESS,
        "inspect-text",
        "show the beginnings of prompts on the page",
        "show the beginnings of prompts in `/v1/cache` and on the page, to every user of this machine; otherwise both"
        " show only numbers of tokens and bytes",
    ),
    Flag(
        group=PROCESS,
        name="watch-parent",
        metavar="on|off",
        choices=ON_OFF,
        short="exit when the parent exits [on under a host]",
        help="exit when the parent process has ended; default: on if started as a host does (`mlx-runner runner ...`),"
        " else off",
    ),
    Flag(
        group=PROCESS,
        name="hand-over",
        metavar="WHICH",
        default=HAND_OVER[0],
        choices=HAND_OVER,
        short="models to leave to Ollama's own runner",
        help="which models Ollama's own runner takes over under `mlx-runner ollama serve`: `auto`, every model that"
        " this runner refuses to load, and models whose pictures only Ollama's runner can read; `sound`, also models"
        " that take sound there; `refused`, only models that are refused; `off`, none; elsewhere this flag has no"
        " effect",
    ),
    Flag(
        group=PROCESS,
        name="log-level",
        metavar="LEVEL",
        choices=("trace", "debug", "info", "warn", "error"),
        short="trace, debug, info, warn, error [$OLLAMA_DEBUG, info]",
        help="the least severe level that is logged: trace, debug, info, warn or error; default: as $OLLAMA_DEBUG"
        " says, else info",
    ),
    Flag(
        group=PROCESS,
        name="trace",
        metavar="FILE",
        short="record where time goes, for ui.perfetto.dev",
        help="record what every slice of computation spends its time on, for https://ui.perfetto.dev or chrome://tracing",
    ),
    Flag(
        group=PROCESS,
        name="record",
        metavar="FILE",
        short="record requests, for `mlx-runner replay FILE`",
        help="record all requests with their prompts and answers, and everything that decides how they are computed:"
        " `mlx-runner replay FILE` computes them again; if FILE exists, the recording is FILE.2, and so on; excludes"
        " pictures and --disk-cache; see docs/replay.md",
    ),
    switch(PROCESS, "verbose", "ignored; hosts send it", "accepted because hosts send it; has no effect"),
)
