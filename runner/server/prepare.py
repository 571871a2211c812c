"""Turns a client's request into a request to the engine. Runs on the threads of `Intake`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NoReturn

from protocol import CompletionRequest, Format, FormatError, decode_format
from runner.engine.ports import Steps, Vision
from runner.engine.request import Limits, Request
from runner.errors import RequestError
from runner.sampling import SamplingOptions
from runner.tokenizer import PART_CHARACTERS, Tokenizer
from runner.tokenizer.detokenizer import StopStrings

_MOST_LOGPROBS = 20  # hosts do not ask for more
_MOST_STOP_CHARACTERS = 65536
_LEAST_TOKEN_BYTES = 64  # of the longest token, at least: normalizers shorten text, an unknown word may be one token
_CHARACTERS_PER_TOKEN = 8  # twice that of prose; a prompt with more, for each token of context, is encoded in parts


def most_prompt_bytes(tokenizer: Tokenizer, context_length: int) -> int:
    """Returns the most bytes, in UTF-8, of a prompt that fits the context. The first call reads the vocabulary."""
    return context_length * max(tokenizer.longest_bytes, _LEAST_TOKEN_BYTES)


def refuse_size(size: int, tokenizer: Tokenizer, limits: Limits) -> NoReturn:
    """Raises RequestError, with the least number of tokens, for a prompt of `size` bytes: over `most_prompt_bytes`."""
    context_length = limits.context_length
    limits.refuse_beyond(size * context_length // most_prompt_bytes(tokenizer, context_length))
    raise AssertionError("a prompt of this size fits")


def with_format(wire: CompletionRequest, vision: Vision) -> tuple[CompletionRequest, Format | None]:
    """Returns `wire`, and the format that the answer must follow. Raises RequestError for an invalid format, and for
    media that the model does not accept."""
    try:
        wanted = decode_format(bytes(wire.format))
    except FormatError as error:
        raise RequestError(str(error)) from None
    vision.check(wire.media)
    return wire, wanted


def check_length_in_parts(text: str, tokenizer: Tokenizer, limits: Limits) -> Iterator[None]:
    """Encodes a prompt that is probably too long, one part in each step. Raises RequestError as soon as it is too long.

    Encoding the whole prompt in one call would take 100 times its memory. A prompt with few characters is not checked.
    """
    if len(text) > max(PART_CHARACTERS, limits.context_length * _CHARACTERS_PER_TOKEN):
        for count in accumulate(map(len, tokenizer.encode_parts([text]))):
            limits.refuse_beyond(count)
            yield


def prepare(
    wire: CompletionRequest,
    tokenizer: Tokenizer,
    limits: Limits,
    wanted_format: Format | None,
    vision: Vision,
    left: Callable[[], bool] = lambda: False,
) -> Steps[Request]:
    """Returns the request to compute. Raises RequestError, with a message that hosts know, if it cannot be computed.

    Yields the media that must be decoded before `Vision.expand` can continue; other media are decoded later. Stops
    between two media when `left` returns True.
    """
    yield from check_length_in_parts(wire.prompt, tokenizer, limits)
    shown = None
    if wire.media:
        shown = yield from vision.expand(wire.prompt, wire.media, tokenizer, limits.context_length, left)
    prompt = tokenizer.encode(wire.prompt) if shown is None else shown.ids
    if not prompt:
        raise RequestError("empty prompt")
    limits.refuse_beyond(len(prompt))
    _refuse_unknown_tokens(prompt if shown is None else shown.keys, tokenizer, limits.vocab_size)
    room = limits.context_length - len(prompt)
    wanted = wire.options.num_predict
    return Request(
        prompt=prompt,
        max_tokens=min(wanted, room) if wanted > 0 else room,
        sampling=_sampling(wire),
        stops=_stops(wire.options.stop),
        metered=wire.include_intermediate_metrics,
        most_drafts=wire.options.draft_num_predict if wire.options.draft_num_predict > 0 else None,
        shown=shown,
        format=wanted_format,
    )


def _refuse_unknown_tokens(prompt: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses tokens that have no embedding, as some tokens for media: MLX would read memory outside the table."""
    token = max(prompt)
    if token >= vocab_size > 0:
        text = tokenizer.token_text(token)
        raise RequestError(
            f"the model has no token {token} ({text!r}): its vocabulary has {vocab_size}; leave it out of the prompt"
        )


def _stops(wanted: Sequence[str]) -> StopStrings | None:
    characters = sum(map(len, wanted))
    if characters > _MOST_STOP_CHARACTERS:
        raise RequestError(f"the stop strings have {characters} characters, and the limit is {_MOST_STOP_CHARACTERS}")
    return StopStrings(wanted) if characters else None


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


def out_of_range(wire: CompletionRequest, sampling: SamplingOptions) -> Iterator[tuple[str, float, str]]:
    """Yields each key with a value out of range, that value, and the value in `sampling` that replaces it."""
    for name, value, instead in sampling.out_of_range():
        yield f"Options.{name}", value, instead
    if wire.top_logprobs != sampling.top_logprobs:
        instead = f"{sampling.top_logprobs}{'' if wire.logprobs else ', without Logprobs'}"
        yield "TopLogprobs", wire.top_logprobs, instead
