"""The generations A..G of Ollama hosts as a table: argv, keys sent, keys read, readiness, close (protocol.md 6, 11)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    """What distinguishes one generation of hosts on the wire."""

    letter: str
    releases: str
    request_keys: tuple[str, ...]
    """Top-level keys in the order written; the lower-case ones are those of the hosts before v0.21.1."""
    option_keys: tuple[str, ...]
    answer_keys: dict[str, str] = field(hash=False)
    """The host's field names, which match a line's keys whatever their case, and ours."""
    ready_path: str = "/v1/status"
    ready_decodes: bool = True
    """Whether the body must decode as a status; else the HTTP status alone counts."""
    engine_flag: bool = True
    close_grace_s: float = 5.0
    """Seconds between SIGINT and SIGKILL; 0 sends SIGKILL at once."""
    repeat_penalty: float = 1.1
    """The default that the host puts into every request."""

    def argv(self, model: str, port: int) -> list[str]:
        """What follows the executable."""
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
)
B = replace(
    A,
    letter="B",
    releases="v0.17.5",
    answer_keys={**_CAMEL_ANSWER, "PeakMemory": "peak_memory"},
    ready_path="/v1/status",
    ready_decodes=True,
)
B_PRIME = replace(B, letter="B'", releases="v0.17.6-v0.17.7", answer_keys=_CAMEL_ANSWER)
C = replace(
    B_PRIME,
    letter="C",
    releases="v0.17.8-rc0-v0.21.0",
    option_keys=(*_EARLY_OPTIONS, "repeat_last_n", "presence_penalty"),
)
D = replace(
    C,
    letter="D",
    releases="v0.21.1-rc0",
    option_keys=(*C.option_keys, "repeat_penalty", "frequency_penalty"),
)
E = replace(
    D,
    letter="E",
    releases="v0.21.1-v0.32.6",
    request_keys=("Prompt", "Options", "Logprobs", "TopLogprobs"),
    option_keys=OPTIONS,
    answer_keys={**_CAMEL_ANSWER, "Logprobs": "logprobs"},
)
F = replace(
    E,
    letter="F",
    releases="v0.32.7-v0.33.0-rc2",
    request_keys=("Prompt", "Media", "Options", "Logprobs", "TopLogprobs"),
    repeat_penalty=1.0,
)
G = replace(
    F,
    letter="G",
    releases="after August 2026",
    request_keys=(*F.request_keys, "Format", "IncludeIntermediateMetrics"),
    answer_keys={**F.answer_keys, "PromptEvalCachedCount": "prompt_eval_cached_count"},
    engine_flag=False,
    close_grace_s=0.0,
)
GENERATIONS: Sequence[Generation] = (A, B, B_PRIME, C, D, E, F, G)
