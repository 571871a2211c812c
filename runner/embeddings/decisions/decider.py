"""`POST /v1/score` for a model that decides: checks a body, and answers it with scores."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from protocol.score import MOST_TEXT_BYTES, score_body
from runner.embeddings.embedder import TextEmbedder, TextToEmbed
from runner.engine.ports import CheckedBody, EncoderUse, Steps, WingEndpoint
from runner.errors import RequestError
from runner.tokenizer import Tokenizer

_TOGETHER = 8
"""The most texts of one request that wait in the embedder at a time. Other requests' texts then have turns."""


class Decision(NamedTuple):
    """A text, and the number of options of each question about it."""

    text: TextToEmbed
    options: Sequence[int]


class Decider(Protocol):
    """A model that decides, as the reader of its requests' bodies. Any thread may call the methods."""

    counts_cached: bool
    """True if answers state a number of cached tokens (always 0)."""

    def read_body(self, body: bytes, tokenizer: Tokenizer) -> Iterator[Decision | None]:
        """Yields the texts of a request, and None where other requests may have a turn. Raises BadRequestError, and
        RequestError in the words that hosts know."""
        ...


@dataclass(frozen=True)
class DecisionsEndpoint:
    """The endpoint `/v1/score`. Sends texts to the engine's embedder, and answers with the scores."""

    decider: Decider
    embedder: TextEmbedder
    tokenizer: Tokenizer
    post: Callable[[Callable[[], None]], None]
    """Makes the engine thread call a function."""

    @property
    def use(self) -> EncoderUse:
        return EncoderUse("decisions, by POST /v1/score", {"/v1/score": WingEndpoint(MOST_TEXT_BYTES, self.check)})

    def check(self, body: Sequence[bytes]) -> Steps[CheckedBody]:
        """Checks a body and tokenizes the texts in it. Raises RequestError in the words that hosts know."""
        decisions = list[Decision]()
        for decision in self.decider.read_body(b"".join(body), self.tokenizer):
            if decision is not None:
                if why := self.embedder.refusal(len(decision.text.tokens)):
                    raise RequestError(why, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                decisions.append(decision)
            yield None
        return CheckedBody(partial(self._answer, decisions), sum(map(len, body)))

    async def _answer(self, decisions: Sequence[Decision]) -> bytes:
        texts = [each.text for each in decisions]
        found = list[list[float]]()
        try:
            for text in texts[:_TOGETHER]:
                self.post(partial(self.embedder.add_text, text))
            for number, text in enumerate(texts):
                found.append(await asyncio.wrap_future(text.found))
                for other in texts[number + _TOGETHER : number + _TOGETHER + 1]:
                    self.post(partial(self.embedder.add_text, other))
        finally:
            for text in texts:
                text.found.cancel()
        scores = list[list[float]]()
        for decision, logits in zip(decisions, found, strict=True):
            stops = [*accumulate(decision.options)]
            scores += [logits[start:stop] for start, stop in pairwise((0, *stops))]
        tokens = sum(len(text.tokens) for text in texts)
        return score_body(scores, tokens, 0 if self.decider.counts_cached else None)
