"""The body that a host sends to `/completion`. It serves hosts of every generation."""

import msgspec

from protocol.golang import Float32, Int64


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options. Hosts omit options that are zero: an absent option means zero, not a default value."""

    seed: Int64 | None = None
    num_predict: Int64 = 0
    num_ctx: Int64 = 0
    top_k: Int64 = 0
    top_p: Float32 = 0.0
    min_p: Float32 = 0.0
    repeat_last_n: Int64 = 0
    temperature: Float32 = 0.0
    repeat_penalty: Float32 = 0.0
    presence_penalty: Float32 = 0.0
    frequency_penalty: Float32 = 0.0
    stop: list[str] = []
    draft_num_predict: Int64 = 0


UNUSED = frozenset(
    ("num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "num_keep", "typical_p")  # of hosts E to H
)
"""Options that hosts of generations E to H send and this runner ignores: only the host itself, or llama.cpp, uses them
(docs/internals/wire.md, 3 and 6). All options of earlier generations are used."""


class Media(msgspec.Struct, frozen=True, kw_only=True, rename={"kind": "Kind"}):
    """A picture or a sound, for the marker `[img-ID]` in the prompt. `data` is the content of its file. `kind` is
    `image` or `audio`, or empty if the host did not recognise the file."""

    data: bytes = b""
    id: Int64 = 0
    kind: str = ""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The body of `POST /completion`. `logprobs` is None if the host is too old to know that key."""

    prompt: str = ""
    media: list[Media] = []
    options: Options = Options()
    logprobs: bool | None = None
    top_logprobs: Int64 = 0
    format: msgspec.Raw = msgspec.Raw()
    include_intermediate_metrics: bool = False

    @property
    def seed(self) -> int | None:
        """The seed of the random numbers that choose tokens; None if the numbers are different for each request.

        Hosts that know logprobs (generation E and later) omit only the seed 0. Older hosts never send a seed.
        """
        if self.options.seed is not None:
            return self.options.seed if self.options.seed >= 0 else None
        return None if self.logprobs is None else 0
