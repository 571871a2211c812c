"""How an answer follows the grammar of its request, if it has one."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from runner.sampling.mask import Mask
from runner.sampling.sample import Choice

if TYPE_CHECKING:
    from runner.grammar import Guide
    from runner.grammar.guide import Grammar

_JUMP_TOKENS = 64  # forced tokens of one step; the model computes the logits of all of them


class AnswerGrammar:
    """The grammar of one answer: it is compiled, then starts, then advances along every token. Without a grammar all
    tokens may come, and nothing waits. Owner: the engine thread."""

    def __init__(self, compiling: "Future[Grammar] | None", eos: Collection[int], *, draws_all: bool) -> None:
        """`eos` end an answer and are not followed. With `draws_all` no token counts as forced: all are drawn."""
        self.guide: Guide | None = None
        """The position of the answer; None before `start`, and without a grammar."""
        self.compiling = compiling
        self._eos = eos
        self._draws_all = draws_all

    @property
    def compiled(self) -> bool:
        """True unless the grammar is still being compiled."""
        return self.compiling is None or self.compiling.done()

    def start(self) -> None:
        """Starts to follow the grammar, which is compiled. Raises RequestError if it cannot be followed."""
        if self.compiling is not None:
            self.guide = self.compiling.result().guide()

    def advance(self, choice: Choice) -> None:
        """Advances along the next tokens; `wait` until that is done."""
        tokens = [token for token in choice.tokens if token not in self._eos]
        if self.guide is not None and tokens:
            self.guide.take(*tokens)

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s`. Returns True if the mask is known."""
        return self.guide is None or self.guide.wait(patience_s)

    def forced(self, most: int) -> list[int]:
        """Takes at most `most` tokens that must come next, and returns them; a step of an answer has a few dozens."""
        return self.guide.forced(min(most, _JUMP_TOKENS)) if self.guide is not None and not self._draws_all else []

    def look_ahead(self, drafts: Sequence[int], patience_s: float) -> tuple[list[Mask], set[int]]:
        """Returns the masks behind the first of these drafts, one each, as far as they may come and others behind them,
        and the places of those drafts behind which a token is forced. What is not known after `patience_s` is left
        out."""
        if self.guide is None:
            return [], set()
        ahead = self.guide.look_ahead(drafts, patience_s)
        forced = set() if self._draws_all else {place for place, mask in enumerate(ahead) if isinstance(mask, int)}
        return [self.guide.bit(mask) if isinstance(mask, int) else mask for mask in ahead], forced

    def restart(self, answer: Sequence[int]) -> None:
        """Goes from the beginning of the grammar, which may be a token ahead, to the end of the answer so far."""
        if self.guide is not None:
            self.guide.restart(answer)

    @property
    def over(self) -> bool:
        """True if no token can come: the answer is complete, or cannot go on."""
        return self.guide is not None and self.guide.over

    @property
    def complete(self) -> bool:
        """True if the answer is complete."""
        return self.guide is not None and self.guide.complete

    @property
    def mask(self) -> Mask | None:
        """The tokens that may come next. None if all may, or if none may, which `Generation.take` will find."""
        return None if self.guide is None or self.guide.over else self.guide.mask()

    def close(self) -> None:
        """Ends the answer, which may not have begun. Later calls do nothing."""
        if self.guide is not None:
            self.guide.close()
        elif (found := self.compiling) and found.done() and not found.cancelled() and found.exception() is None:
            found.result().release()
