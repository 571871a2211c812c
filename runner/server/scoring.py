"""`POST /v1/score`: the log-probabilities of candidates for the token after each prompt of a request.

Each row becomes a request to the engine whose answer has no token. The request waits for its turn, shares prefixes
through the cache, and ends when the client leaves. All rows are checked before any is computed.
"""

import json
from collections.abc import Generator, Sequence
from hashlib import sha256
from http import HTTPStatus
from itertools import accumulate

from aiohttp import web

from protocol.score import (
    MOST_CANDIDATES,
    MOST_MEDIA_BYTES,
    MOST_ROWS,
    MOST_TEXT_BYTES,
    Row,
    decode_score,
    score_body,
)
from runner.engine.engine import Engine
from runner.engine.events import Failed, Finished, Refused, Scored
from runner.engine.ports import Steps
from runner.engine.request import Request
from runner.errors import RequestError
from runner.sampling import SamplingOptions
from runner.server.completion import NUMBER
from runner.server.intake import Incoming, Intake
from runner.tokenizer import Tokenizer

_LONG = 1 << 12
"""The most characters of a prompt's end for which all candidates are tokenized in one step; else each has a step."""
_Known = dict[bytes, list[int]]
"""Digest of a row's texts -> the tokens of the row's candidates, so that a repeated row is not tokenized again."""
_MOST_KNOWN = 4096
_AT_ONCE = 2
"""The rows of one client that are computed at the same time. The second row shows the cache where prefixes differ."""


class ScoreEndpoint:
    """Checks rows on other threads, and has the engine compute them."""

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._engine = engine
        self._intake = intake
        self._known = _Known()

    async def post(self, http: web.Request) -> web.Response:
        """Answers one score request. The server cancels this call when the client disconnects."""
        self._engine.encoder_use.refuse_prompts()
        vision = self._engine.vision
        with Incoming(self._intake, vision) as incoming:
            await incoming.read_all(http, MOST_TEXT_BYTES + (MOST_MEDIA_BYTES if vision.sees else 0))
            requests = await incoming.check_body(_checked(incoming.chunks, self._engine, self._known))
            http[NUMBER] = requests[0].number
            for request in requests:
                await incoming.decode(request.shown)
            try:
                scores = [await self._scored(requests, row) for row in range(len(requests))]
            finally:
                for request in requests:
                    request.cancel()
        counts = (sum(len(each.prompt) for each in requests), sum(cached for _, cached in scores))
        return web.Response(body=score_body([logits for logits, _ in scores], *counts), content_type="application/json")

    async def _scored(self, requests: Sequence[Request], row: int) -> tuple[list[float], int]:
        """Returns the scores of a row, and the number of cached tokens in it. Raises RequestError if the row failed."""
        for request in requests[0 if row == 0 else row + _AT_ONCE - 1 : row + _AT_ONCE]:
            self._engine.submit(request)
        scores: list[float] = []
        while True:
            for event in await requests[row].stream.batch():
                match event:
                    case Scored(logprobs):
                        scores = logprobs
                    case Finished(_, metrics):
                        return scores, metrics.prompt_eval_cached_count or 0
                    case Refused(text):
                        raise RequestError(text)
                    case Failed(text):
                        raise RequestError(text, HTTPStatus.INTERNAL_SERVER_ERROR)


def _checked(chunks: Sequence[bytes], engine: Engine, known: _Known) -> Steps[list[Request]]:
    """Returns a request for each row. Raises RequestError, with a message that hosts know, if a row is invalid."""
    tokenizer, limits, requests = engine.tokenizer, engine.limits, list[Request]()
    wanted = decode_score(b"".join(chunks))
    if not 1 <= len(wanted.rows) <= MOST_ROWS:
        raise RequestError(f"scoring requires 1\u2013{MOST_ROWS} prompts")
    if not 1 <= wanted.max_tokens <= limits.context_length:
        raise RequestError(f"max_tokens must be between 1 and {limits.context_length}")
    engine.vision.check(wanted.media)
    for number, row in enumerate(wanted.rows):
        text, shown = row.prompt, None
        _refuse_long(number, row.prompt, wanted.max_tokens, tokenizer)
        if wanted.media:
            named, text = engine.vision.markers(row.prompt)
            media = [each for each in wanted.media if each.id in named]
            shown = yield from engine.vision.expand(row.prompt, media, tokenizer, wanted.max_tokens, bos=False)
        last = tokenizer.encode_without_bos(text)
        prompt = last if shown is None else shown.ids
        _refuse_count(number, len(prompt), wanted.max_tokens)
        if max(prompt if shown is None else shown.keys) >= limits.vocab_size > 0:
            raise RequestError(f"prompt {number} has tokens that the model does not have")
        key = sha256(json.dumps([text, row.candidates]).encode()).digest()
        if (candidates := known.get(key)) is None:
            candidates = yield from _candidates(number, row, text, last, tokenizer)
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = candidates
        if len(set(candidates)) < len(candidates) or max(candidates) >= (limits.vocab_size or tokenizer.vocab_size):
            raise RequestError(f"prompt {number} has invalid or duplicate candidate tokens")
        request = Request(
            prompt=prompt,
            max_tokens=1,
            sampling=SamplingOptions(candidates=tuple(candidates)),
            stops=None,
            metered=False,
            most_drafts=0,
            shown=shown,
        )
        requests.append(request)
        yield None
    return requests


def _refuse_long(number: int, text: str, most: int, tokenizer: Tokenizer) -> None:
    """Refuses a prompt that is far too long, without tokenizing all of it."""
    if len(text) > most * tokenizer.longest_bytes:
        for count in accumulate(map(len, tokenizer.encode_parts([text]))):
            if count > most:
                _refuse_count(number, count, most)


def _refuse_count(number: int, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise RequestError(f"prompt {number} has {count} tokens; expected 1\u2013{most} (input is never truncated)")


def _candidates(
    number: int, row: Row, text: str, ids: Sequence[int], tokenizer: Tokenizer
) -> Generator[None, None, list[int]]:
    """Returns the token of each candidate. `text` is the end of the prompt, and `ids` are the tokens of `text`."""
    if not 1 <= len(row.candidates) <= MOST_CANDIDATES:
        raise RequestError(f"prompt {number} requires 1\u2013{MOST_CANDIDATES} candidates")
    tail, known = _tail(text, ids, tokenizer)
    tokens = []
    for candidate in row.candidates:
        *before, last = tokenizer.encode_without_bos(tail + candidate) or [-1]
        if before != known or last in tokenizer.special:
            text = json.dumps(candidate, ensure_ascii=False)
            raise RequestError(f"candidate {text} must append exactly one ordinary token to prompt {number}")
        tokens.append(last)
        if len(tail) > _LONG:
            yield
    return tokens


def _tail(text: str, prompt: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Returns the end of a prompt from the last special token on, and the tokens of this end. Only this end affects the
    tokens of a candidate, so only this end is tokenized again with each candidate."""
    at = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in tokenizer.special), 0)
    if at:
        mark = tokenizer.token_text(prompt[at - 1])
        tail = mark + text.rpartition(mark)[2]
        known = tokenizer.encode_without_bos(tail)
        if known == [*prompt[at - 1 :]]:
            return tail, known
    return text, [*prompt]
