"""The body that a host sends to `/completion`, for every generation of hosts."""

import msgspec

from protocol.golang import Float32, Int64


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options. A host omits options that are zero, so an absent option is zero and never a default."""

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
    ("num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "num_keep", "typical_p")  # E to H
)
"""Options of these generations of hosts that have no effect here: they are the host's own, or llama.cpp's
(docs/internals/wire.md, 3 and 6). All options of earlier hosts are used."""


class Media(msgspec.Struct, frozen=True, kw_only=True, rename={"kind": "Kind"}):
    """A picture or a sound, for the marker `[img-ID]` of the prompt. `data` is a file; `kind` is `image` or `audio`, or
    empty if the host did not recognise it."""

    data: bytes = b""
    id: Int64 = 0
    kind: str = ""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The body of `POST /completion`. `logprobs` is None if the host is too old to know the key."""

    prompt: str = ""
    media: list[Media] = []
    options: Options = Options()
    logprobs: bool | None = None
    top_logprobs: Int64 = 0
    format: msgspec.Raw = msgspec.Raw()
    include_intermediate_metrics: bool = False

    @property
    def seed(self) -> int | None:
        """The seed of the draws; None for random draws.

        Hosts that know logprobs (generation E and later) send every seed but 0; older hosts never send one.
        """
        if self.options.seed is not None:
            return self.options.seed if self.options.seed >= 0 else None
        return None if self.logprobs is None else 0
