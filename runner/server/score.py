"""`POST /v1/score`: the log-probabilities of candidates after each of several prompts, in one JSON object.

Each row is a request to the engine like any other, of no token: it is prefilled in its turn, shares prefixes through
the cache, and leaves when its client does. Everything is checked before anything is computed.
"""

import asyncio
import json
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from itertools import accumulate, pairwise

from aiohttp import web

from protocol.score import (
    MOST_CANDIDATES,
    MOST_MEDIA_BYTES,
    MOST_ROWS,
    MOST_TEXT_BYTES,
    Row,
    ScoreRequest,
    decode_score,
    score_body,
)
from runner.engine.engine import Engine
from runner.engine.events import Failed, Finished, Refused, Scored
from runner.engine.ports import Decider, Decision
from runner.engine.request import Request, ShownPrompt, UnmeasuredError
from runner.errors import RequestError
from runner.sampling import SamplingOptions
from runner.server.completion import NUMBER, in_hand, refuse_encoder, take_steps
from runner.server.request_body import Body, RequestBodies
from runner.server.tokenize import TokenizeThreads
from runner.tokenizer import Tokenizer

_LONG = 1 << 12
"""Characters. A longer end of a prompt, which is tokenized for each candidate, lets others have a turn in between."""
_MOST_KNOWN = 4096
"""Rows whose candidates are known, by the digest of their texts: a repeat does not tokenize them again."""
_Known = dict[bytes, list[int]]
_TOGETHER = 8
"""The texts of one client that wait for a decision at once: others' get their turn between them."""
_AT_ONCE = 2
"""The rows of one client that are computed at once: from the second one the cache learns where their prefixes part."""


class ScoreEndpoint:
    """Checks rows off the event loop, and has the engine compute them."""

    def __init__(self, engine: Engine, threads: TokenizeThreads, bodies: RequestBodies) -> None:
        self._engine = engine
        self._threads = threads
        self._bodies = bodies
        self._known = _Known()

    async def post(self, http: web.Request) -> web.Response:
        """Scores all rows. The server cancels this when the client disconnects."""
        if self._engine.decider is not None:
            return await self._decide(http, self._engine.decider)
        refuse_encoder(self._engine)
        vision = self._engine.vision
        with self._bodies.body() as held:
            body = Body()
            await held.read(http, MOST_TEXT_BYTES + (MOST_MEDIA_BYTES if vision.sees else 0), body.take)
            steps = _checked(body.chunks, self._engine, self._known)
            requests = await take_steps(self._threads, body, steps, Request, vision)
            http[NUMBER] = requests[0].number
            async with in_hand(requests, vision):
                scores = [await self._scored(requests, row) for row in range(len(requests))]
        counts = (sum(len(each.prompt) for each in requests), sum(cached for _, cached in scores))
        return web.Response(body=score_body([logits for logits, _ in scores], *counts), content_type="application/json")

    async def _decide(self, http: web.Request, decider: Decider) -> web.Response:
        """The same by a model with a head of its own."""
        with self._bodies.body() as held:
            body = Body()
            await held.read(http, MOST_TEXT_BYTES, body.take)
            steps = _decisions(body.chunks, decider, self._engine)
            decisions = await take_steps(self._threads, body, steps, Decision, self._engine.vision)
            texts = [each.text for each in decisions]
            found = list[list[float]]()
            try:
                for text in texts[:_TOGETHER]:
                    self._engine.embed(text)
                for number, text in enumerate(texts):
                    found.append(await asyncio.wrap_future(text.found))
                    for other in texts[number + _TOGETHER : number + _TOGETHER + 1]:
                        self._engine.embed(other)
            finally:
                for text in texts:
                    text.found.cancel()
        scores = list[list[float]]()
        for decision, logits in zip(decisions, found, strict=True):
            stops = [*accumulate(decision.options)]
            scores += [logits[start:stop] for start, stop in pairwise((0, *stops))]
        tokens = sum(len(text.tokens) for text in texts)
        return web.Response(
            body=score_body(scores, tokens, 0 if decider.counts_cached else None), content_type="application/json"
        )

    async def _scored(self, requests: Sequence[Request], row: int) -> tuple[list[float], int]:
        """Returns the scores of a row, and the number of its tokens that the cache held. Raises RequestError."""
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


def _decisions(chunks: Sequence[bytes], decider: Decider, engine: Engine) -> Iterator[Decision | None]:
    """Yields the texts of a body. Raises RequestError."""
    embedder = engine.embedder
    assert embedder is not None
    for decision in decider.read(b"".join(chunks), engine.tokenizer):
        if decision is not None and (why := embedder.refusal(len(decision.text.tokens))):
            raise RequestError(why, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        yield decision


def _checked(chunks: Sequence[bytes], engine: Engine, known: _Known) -> Iterator[Request | ShownPrompt | None]:
    """Yields a request for each row, media that have to be decoded first, and None where others may have a turn. Raises
    BadRequestError, and RequestError in the words that hosts know. Several threads may share `known`."""
    tokenizer, limits = engine.tokenizer, engine.limits
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
            text, shown = yield from _shown(row.prompt, wanted, engine)
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
        yield Request(
            prompt=prompt,
            max_tokens=1,
            sampling=SamplingOptions(candidates=tuple(candidates)),
            stops=None,
            metered=False,
            most_drafts=0,
            shown=shown,
        )


def _refuse_long(number: int, text: str, most: int, tokenizer: Tokenizer) -> None:
    """Refuses a prompt that is far too long, without reading it to its end."""
    if len(text) <= most * tokenizer.longest_bytes:
        return
    count = 0
    for part in tokenizer.encode_parts([text]):
        count += len(part)
        if count > most:
            _refuse_count(number, count, most)


def _refuse_count(number: int, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise RequestError(f"prompt {number} has {count} tokens; expected 1\u2013{most} (input is never truncated)")


def _shown(
    prompt: str, wanted: ScoreRequest, engine: Engine
) -> Generator[ShownPrompt, None, tuple[str, ShownPrompt | None]]:
    """Returns the text after the last marker of a prompt, and the tokens of the whole prompt, media included. Yields
    media that have to be decoded first."""
    from runner.media.prompt import Marker, split_markers  # no text needs it

    parts = [*split_markers(prompt)]
    named = [each for each in wanted.media if Marker(each.id) in parts]
    expand = partial(engine.vision.expand, prompt, named, engine.tokenizer, wanted.max_tokens, bos=False)
    try:
        return str(parts[-1]), expand()
    except UnmeasuredError as error:
        yield error.prompt
    return str(parts[-1]), expand()


def _candidates(
    number: int, row: Row, text: str, ids: Sequence[int], tokenizer: Tokenizer
) -> Generator[None, None, list[int]]:
    """Returns the token that each candidate adds to a prompt that ends with `text`, whose tokens are `ids`."""
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
    """Returns the end of a prompt that decides how what follows is tokenized, and its tokens: all from the last special
    token on. So the prompt of a chat is not tokenized again for each candidate."""
    at = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in tokenizer.special), 0)
    if at:
        mark = tokenizer.token_text(prompt[at - 1])
        tail = mark + text.rpartition(mark)[2]
        known = tokenizer.encode_without_bos(tail)
        if known == [*prompt[at - 1 :]]:
            return tail, known
    return text, [*prompt]
