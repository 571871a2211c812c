"""`POST /v1/score` of a model that decides by a head of its own: texts, and questions about each."""

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
"""The texts of one client that wait at once, so that other clients' texts have their turns."""


class Decision(NamedTuple):
    """A text, and the number of options of each question about it."""

    text: TextToEmbed
    options: Sequence[int]


class Decider(Protocol):
    """Reads bodies for a model. Any thread may call it."""

    counts_cached: bool
    """True if answers have a count of cached tokens."""

    def read_body(self, body: bytes, tokenizer: Tokenizer) -> Iterator[Decision | None]:
        """Yields the texts of a request, and None where other requests may have a turn. Raises BadRequestError, and
        RequestError in the words that hosts know."""
        ...


@dataclass(frozen=True)
class DecisionsEndpoint:
    """Checks bodies, and answers them with scores from the engine."""

    decider: Decider
    embedder: TextEmbedder
    tokenizer: Tokenizer
    post: Callable[[Callable[[], None]], None]
    """Makes the engine thread call a function."""

    @property
    def use(self) -> EncoderUse:
        return EncoderUse("decisions, by POST /v1/score", {"/v1/score": WingEndpoint(MOST_TEXT_BYTES, self.check)})

    def check(self, body: Sequence[bytes]) -> Steps[CheckedBody]:
        """Checks a body and tokenizes its texts. Raises RequestError in the words that hosts know."""
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
