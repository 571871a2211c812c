"""A request as the engine takes it, and the way there: decode, tokenize, validate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol import CompletionRequest, Media
from runner.engine.events import EventStream
from runner.engine.text import StopStrings
from runner.errors import RequestError
from runner.sampling import SamplingOptions
from runner.tokenizer import Tokenizer

_MOST_LOGPROBS = 20  # hosts let nobody ask for more


@dataclass(eq=False, kw_only=True)
class Request:
    """One completion to compute. Made off the engine thread, which only reads it; any thread may cancel it."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingOptions
    stops: StopStrings | None
    metered: bool
    stream: EventStream = field(default_factory=EventStream)
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for the answer any more: the engine drops the request at its next slice."""
        self.cancelled = True


def prepare(wire: CompletionRequest, tokenizer: Tokenizer, context_length: int) -> Request:
    """The request to compute for what came over the wire. RequestError, in the words hosts know, if it cannot be."""
    _refuse_media(wire.media)
    if wire.wants_format:
        raise RequestError("Format (structured output) is not supported by this runner version; leave it out")
    prompt = tokenizer.encode(wire.prompt)
    if not prompt:
        raise RequestError("empty prompt")
    if len(prompt) >= context_length:
        raise RequestError(
            f"input length ({len(prompt)} tokens) exceeds the model's maximum context length ({context_length} tokens)"
        )
    room = context_length - len(prompt)
    wanted = wire.options.num_predict
    return Request(
        prompt=prompt,
        max_tokens=min(wanted, room) if wanted > 0 else room,
        sampling=_sampling(wire),
        stops=StopStrings(wire.options.stop) if any(wire.options.stop) else None,
        metered=wire.include_intermediate_metrics,
    )


def _refuse_media(media: Sequence[Media]) -> None:
    if media:
        raise RequestError(f"this model does not support {media[0].kind or 'media'} input")


def _sampling(wire: CompletionRequest) -> SamplingOptions:
    options = wire.options
    return SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repeat_last_n=options.repeat_last_n,
        seed=wire.seed,
        logprobs=bool(wire.logprobs),
        top_logprobs=min(max(0, wire.top_logprobs), _MOST_LOGPROBS) if wire.logprobs else 0,
    )
