"""The generations A..H of Ollama hosts as a table: argv, keys sent, keys read, readiness, close.

See docs/internals/wire.md, 6, 11.

Where the releases of one generation differ in something but the wire, the table shows the newest of them; what they
make of the runner's output is a table of its own, `output.RULES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from scripts.tools.host.lib.output import (
    EVERY_LINE,
    FIRST_MARKER,
    LAST_OF_BOTH,
    LAST_STDERR,
    SCANNED,
    SCANNED_BOTH,
    Rule,
)

OPTIONS = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict", "num_keep", "seed"),
    *("num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "temperature", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "stop"),
)
"""Every option of the API in the order in which a Go host writes them."""

_EARLY_OPTIONS = ("temperature", "top_p", "min_p", "top_k", "num_predict")
_SNAKE_ANSWER = {
    key: key
    for key in (
        *("content", "done", "done_reason", "prompt_eval_count", "prompt_eval_duration", "eval_count"),
        "eval_duration",
    )
}
_CAMEL_ANSWER = {
    "Content": "content",
    "Done": "done",
    "DoneReason": "done_reason",
    "PromptEvalCount": "prompt_eval_count",
    "PromptEvalDuration": "prompt_eval_duration",
    "EvalCount": "eval_count",
    "EvalDuration": "eval_duration",
    "Error": "error",
}


@dataclass(frozen=True)
class Generation:
    """The differences of one generation of hosts on the wire."""

    letter: str
    releases: str
    request_keys: tuple[str, ...]
    """Top-level keys in the order written; the lower-case ones are those of the hosts before v0.21.1."""
    option_keys: tuple[str, ...]
    answer_keys: dict[str, str] = field(hash=False)
    """The host's field names, which match a line's keys whatever their case, and ours."""
    ready_path: str = "/v1/status"
    ready_decodes: bool = True
    """True if the body must decode as a status; otherwise only the HTTP status counts."""
    engine_flag: bool = True
    close_grace_s: float = 5.0
    """Seconds between SIGINT and SIGKILL; 0 sends SIGKILL at once."""
    repeat_penalty: float = 1.1
    """The default that the host puts into every request."""
    rules: tuple[Rule, ...] = (EVERY_LINE,)
    """The rules by which its releases read the runner's output, the oldest first."""
    load_timeout_s: float = 300.0
    """Seconds from the start until the runner must be ready."""
    request_timeout_s: float | None = None
    """Seconds for a whole request, its stream included; None is for ever."""
    waits_with_request: bool = True
    """True if a load ends when the request that triggered it is cancelled."""
    cuda_headers: bool = True
    """True if CUDA_PATH and CUDA_HOME name the host's own headers."""
    keeps_status: bool = True
    """True if a refusal before the stream reaches the user with its status; otherwise its text comes with a 500."""
    expires_on_oom: bool = True
    """True if an error text that speaks of memory unloads every model."""
    format: Literal["none", "raw", "tag"] = "none"
    """The form in which `format` is sent: not at all, as the user gave it, or wrapped in a structural tag."""
    two_passes: bool = True
    """True if a thinking model's structured output takes a second request (docs/internals/wire.md, 8.4)."""
    new_store: bool = False
    """True if its tags lie in the tree of 0.40 (docs/internals/store.md, 1)."""

    @property
    def rule(self) -> Rule:
        return self.rules[-1]

    def argv(self, model: str, port: int) -> list[str]:
        engine = ["--mlx-engine"] if self.engine_flag else []
        return ["runner", *engine, "--model", model, "--port", str(port)]

    @property
    def default_options(self) -> dict[str, object]:
        """The options of a request whose user set none."""
        defaults: dict[str, object] = {
            "num_ctx": 4096,
            "num_batch": 512,
            "num_gpu": -1,
            "num_keep": 4,
            "seed": -1,
            "num_predict": -1,
            "top_k": 40,
            "top_p": 0.9,
            "typical_p": 1.0,
            "repeat_last_n": 64,
            "temperature": 0.8,
            "repeat_penalty": self.repeat_penalty,
        }
        return {key: value for key, value in defaults.items() if key in self.option_keys}


A = Generation(
    "A",
    "v0.16.2-v0.17.4",
    request_keys=("prompt", "options"),
    option_keys=_EARLY_OPTIONS,
    answer_keys=_SNAKE_ANSWER,
    ready_path="/health",
    ready_decodes=False,
    rules=(SCANNED_BOTH, SCANNED),
    load_timeout_s=120.0,
    request_timeout_s=600.0,
    waits_with_request=False,
    cuda_headers=False,
    keeps_status=False,
    expires_on_oom=False,
)
B = replace(
    A,
    letter="B",
    releases="v0.17.5",
    answer_keys={**_CAMEL_ANSWER, "PeakMemory": "peak_memory"},
    ready_path="/v1/status",
    ready_decodes=True,
    rules=(SCANNED,),
)
B_PRIME = replace(B, letter="B'", releases="v0.17.6-v0.17.7", answer_keys=_CAMEL_ANSWER)
C = replace(
    B_PRIME,
    letter="C",
    releases="v0.17.8-rc0-v0.21.0",
    option_keys=(*_EARLY_OPTIONS, "repeat_last_n", "presence_penalty"),
    rules=(SCANNED, LAST_STDERR),
    request_timeout_s=None,  # 10 minutes before v0.20.4
    waits_with_request=True,
    cuda_headers=True,
)
D = replace(
    C,
    letter="D",
    releases="v0.21.1-rc0",
    option_keys=(*C.option_keys, "repeat_penalty", "frequency_penalty"),
    rules=(LAST_STDERR,),
)
E = replace(
    D,
    letter="E",
    releases="v0.21.1-v0.32.6",
    request_keys=("Prompt", "Options", "Logprobs", "TopLogprobs"),
    option_keys=OPTIONS,
    answer_keys={**_CAMEL_ANSWER, "Logprobs": "logprobs"},
    rules=(LAST_STDERR, LAST_OF_BOTH, FIRST_MARKER, EVERY_LINE),
    load_timeout_s=300.0,  # 2 minutes before v0.32.1
    keeps_status=True,
    expires_on_oom=True,  # since v0.30.0
)
F = replace(
    E,
    letter="F",
    releases="v0.32.7-v0.33.0",
    request_keys=("Prompt", "Media", "Options", "Logprobs", "TopLogprobs"),
    repeat_penalty=1.0,
    rules=(EVERY_LINE,),
)
F_PRIME = replace(
    F,
    letter="F'",
    releases="v0.33.1",
    request_keys=("Prompt", "Media", "Format", "Options", "Logprobs", "TopLogprobs"),
    format="raw",
)
F_SECOND = replace(
    F_PRIME,
    letter="F''",
    releases="v0.34.0",
    request_keys=(*F_PRIME.request_keys, "IncludeIntermediateMetrics"),
    answer_keys={**F.answer_keys, "PromptEvalCachedCount": "prompt_eval_cached_count"},
    format="tag",
)
G_PRIME = replace(F_SECOND, letter="G'", releases="v0.34.1", close_grace_s=0.0)
G = replace(G_PRIME, letter="G", releases="after v0.34.1", engine_flag=False, two_passes=False)
H = replace(G, letter="H", releases="v0.40.0-v0.40.12", request_keys=F_PRIME.request_keys, new_store=True)
GENERATIONS: Sequence[Generation] = (A, B, B_PRIME, C, D, E, F, F_PRIME, F_SECOND, G_PRIME, G, H)
