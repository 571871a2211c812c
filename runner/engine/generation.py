"""A generation: a request that is being computed, from the first slice of its prompt to its last token."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from protocol import DoneReason, Logprob, Metrics, TopLogprob
from runner.cache.session import Session
from runner.device import on_cuda
from runner.engine.answer_grammar import AnswerGrammar, compile_error
from runner.engine.events import Event, Failed, Finished, Scored, Text
from runner.engine.lifecycle import Lifecycle
from runner.engine.request import Request
from runner.errors import NO_NUMBERS, RequestError
from runner.logs import Log, exception_line
from runner.sampling.sample import Choice
from runner.sampling.sampler import Sampler
from runner.tokenizer import Tokenizer
from runner.tokenizer.detokenizer import Detokenizer, TextPiece, join_pieces
from runner.trace import TRACE

if TYPE_CHECKING:
    from runner.engine.ports import Drafter, PromptMedia
    from runner.sampling.sampler import Broadcast

log = Log(__name__)

Forward = Callable[[mx.array, list[object]], mx.array]
"""A function from tokens [B, L] and the layer caches to logits [B, L, V]."""


class NoMedia:
    """The media of a prompt that has no media."""

    ready = True

    def slice_tokens(self, position: int, most: int) -> int:
        del position
        return most

    def forward(self, recorded: Sequence[int], at: int, count: int, layers: list[object], run: Forward) -> None:
        run(mx.array([recorded[at : at + count]]), layers)

    def features(self, at: int, count: int) -> Sequence[tuple[int, int, mx.array]]:
        del at, count
        return ()

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        del make_room
        return True

    def close(self) -> None:
        pass


class Generation:
    """A request that is being computed: its prompt slice by slice, then its answer as a member of a batch.

    It exists from the moment the request leaves the queue until `close`. Always call `close`: it keeps the cache and
    the layers consistent. Owner: the engine thread.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        tokenizer: Tokenizer,
        context_length: int,
        started_ns: int,
        media: "PromptMedia",
        drafter: "Drafter | None" = None,
        broadcast: "Broadcast | None" = None,
    ) -> None:
        """`started_ns` is the time at which the request left the queue; `media` are the media of the prompt. The
        `drafter` proposes tokens of the answer; `broadcast` is as for `Sampler`."""
        # Set for the life of the request.
        self.request = request
        self.tokenizer = tokenizer
        self._context_length = context_length
        self.shift = 0 if request.shown is None else request.shown.shift
        """The position of a token after the prompt, less its offset."""
        self.drafter = drafter
        self.media = media
        self.grammar = AnswerGrammar(request.grammar, tokenizer.eos, draws_all=request.sampling.logprobs)
        self.text: Detokenizer[Logprob] = Detokenizer(tokenizer.token_bytes, request.stops)
        self.life = Lifecycle(request.arrived_ns, started_ns, computed_ns=perf_counter_ns())
        self._broadcast = broadcast
        # Needed until the first token.
        self.keep_logits: Callable[[mx.array], None] | None = None
        """The function that keeps the logits [1, V] after the prompt; None if they are not kept."""
        self.first_logits: mx.array | None = None
        """The logits after the prompt, once their forward is dispatched."""
        # Valid until the request restarts.
        self.session = session
        self.restarted = False
        """True if the request was restarted once because memory ran out."""
        # Valid until the request returns to prefill.
        self.may_batch = request.max_tokens != 1
        """True if the answer may decode in a batch with others. False for an answer of one token: joining would not pay
        off, and scores come from a forward of their own."""
        self._sampling = request.sampling
        self._sampler: Sampler | None = None
        # Valid until the next token.
        self.room = request.max_tokens
        """The number of tokens that the answer may still get."""
        self.unseen = 0
        """The number of recorded tokens that the layers will not have seen if the answer ends now."""
        self.done = False
        """True if the request has ended."""

    # --- the prompt

    @property
    def left(self) -> int:
        """The number of tokens to prefill before the first decode step; at least 1 if the first token is known."""
        return max(int(self.session.first is not None), len(self.session.recorded) - 1 - self.session.position)

    @property
    def lacks_features(self) -> bool:
        """True if an item of media must be encoded before the prefill can continue."""
        return self.left > 0 and self.media.slice_tokens(self.session.position, 1) == 0

    def prefill(self, most: int, forward: Forward) -> int:
        """Computes the next slice of the prompt: at most `most` tokens. Returns the number of tokens computed."""
        session = self.session
        at = session.position
        count = self.media.slice_tokens(at, session.next_forward(most))
        with session.forward(count):
            self.media.forward(session.recorded, at, count, session.layers, forward)
        TRACE.lap("forward")
        mx.eval(session.state())
        TRACE.lap("wait")
        if not on_cuda():  # where freed buffers go back to the driver, and the next prompt waits for others
            mx.clear_cache()  # the next forwards need buffers of other sizes
        if self.drafter is not None:
            self.drafter.index(2 * count)
        return count

    def take_first(self, token: int) -> list[Event]:
        """Takes the known first token of the answer, without a forward. Returns the events for the client. If the token
        completes a stop string, it is forgotten and computed again, so that the cache is left as after any other
        answer."""
        session, life = self.session, self.life
        life.decoded_ns = life.decoded_ns or perf_counter_ns()
        if self.text.completes_stop(token):
            session.forget_first()
            return []
        session.first = None
        life.known = 1
        return self.push([token])

    # --- the grammar

    def start_grammar(self) -> list[Event]:
        """Starts to follow the request's grammar, which must be compiled. If the grammar forces the first tokens of the
        answer, they are appended and later prefilled like the prompt. Returns the events for the client."""
        grammar = self.grammar
        if grammar.guide is not None or grammar.compiling is None:
            return []
        try:
            if not grammar.start():  # the client has left, or was told of the error
                self._end("cancelled" if compile_error(grammar.compiling) is None else "refused")
                return []
            events = self.push(grammar.forced(self.room), completes=grammar.complete)
        except Exception as error:  # of this request alone
            return self.fail(error)
        self.life.forced = self.life.generated
        return events

    def with_forced(self, choice: Choice, *, alone: bool) -> Choice:
        """Returns `choice`, whose tokens the grammar has followed, for `take`. If the answer decodes `alone`, the
        tokens that the grammar forces next are added."""
        *before, last = choice, *choice.following
        if not alone or last.token in self.tokenizer.eos:
            return choice
        forced = self.grammar.forced(self.room - len(choice.tokens))
        if not forced:
            return choice
        if self._sampler is not None:
            self._sampler.skip(forced)
        last = last._replace(forced=[*last.forced, *forced])
        return before[0]._replace(following=[*before[1:], last]) if before else last

    def restart_grammar(self) -> None:
        """Restarts the grammar, which may be one token ahead, and follows the answer so far."""
        self.grammar.restart(self.session.recorded[self.session.total :])

    def ends_after(self, choice: Choice) -> bool:
        """Returns True if the answer ends with `choice`. The grammar must have followed its tokens."""
        return choice.token in self.tokenizer.eos or self.grammar.over or 1 + len(choice.forced) >= self.room

    # --- decode

    def start_decode(self) -> None:
        """Notes the time of the first decode step."""
        self.life.decoded_ns = self.life.decoded_ns or perf_counter_ns()

    def sampler(self, vocab_size: int) -> Sampler:
        """Returns the sampler of the answer. The sampler knows the tokens drawn so far."""
        if self._sampler is None:
            drawn = self.session.recorded[self.session.total :]
            rest = (vocab_size, self._context_length, drawn, self._broadcast)
            self._sampler = Sampler(self._sampling, self.request.prompt, *rest)
        return self._sampler

    # --- the tokens

    def take(self, choice: Choice) -> list[Event]:
        """Takes the tokens of `choice`, up to the end of the answer. Returns the events for the client."""
        *before, last = choice, *choice.following
        events: list[Event] = []
        try:
            if not choice.from_numbers:  # the tokens of a round always are
                self.session.distrusted = True
                return self.abort(NO_NUMBERS)
            if self.first_logits is not None and self.keep_logits is not None:  # the token came from numbers
                self.keep_logits(self.first_logits)
                self.first_logits = self.keep_logits = None
            for each in before:
                if not self.done:
                    events += self._take(each)
            if not self.done:
                guide = self.grammar.guide
                if guide is not None and guide.fault:
                    return events + self.abort(guide.fault)
                events += self._take(last, completes=guide is not None and guide.complete)
        except Exception as error:  # of this request alone
            return events + self.fail(error)
        return events

    def _take(self, choice: Choice, *, completes: bool = False) -> list[Event]:
        self.unseen = len(choice.forced) + int(self.room <= 1)
        is_scored = bool(self.request.sampling.candidates)
        if is_scored or choice.token in self.tokenizer.eos:
            self.session.record(choice.token)
            self.life.first_token_ns = self.life.first_token_ns or perf_counter_ns()
            scores = [Scored([logprob for _, logprob in choice.top])] if is_scored else []
            return [*scores, *self._finish(DoneReason.STOP)]
        before = self.life.generated
        logprob = None if choice.logprob is None else self._entry(choice, choice.logprob)
        events = self.push([choice.token, *choice.forced], logprob, completes=completes)
        self.life.forced += self.life.generated - before - 1
        return events

    def push(self, tokens: Sequence[int], entry: Logprob | None = None, *, completes: bool = False) -> list[Event]:
        """Appends `tokens` to the answer. With `completes`, the grammar ends after these tokens. `entry` is the
        log-probability of the first token. Returns the events for the client."""
        if tokens:
            self.life.first_token_ns = self.life.first_token_ns or perf_counter_ns()
        for token in tokens:
            self.session.record(token)  # record all tokens, even after the end of the text: the layers see all of them
        pieces, before = [], self.life.generated
        cut = False
        for token in tokens:
            self.life.generated += 1
            self.room -= 1
            if piece := self.text.push(token, entry):
                pieces.append(piece)
            entry = None
            cut = self.text.stopped or not self.room
            if cut:
                break
        events = self._text(join_pieces(pieces)) if pieces else []
        if completes and self.life.generated - before == len(tokens):
            return [*events, *self._finish(DoneReason.STOP)]
        return [*events, *self._finish(DoneReason.LENGTH)] if cut else events

    def _entry(self, choice: Choice, logprob: float) -> Logprob:
        """Returns the chosen token and its likeliest alternatives, each as text, not as an id."""
        text = self.tokenizer.token_text
        return Logprob(text(choice.token), logprob, [TopLogprob(text(token), each) for token, each in choice.top])

    def _text(self, piece: TextPiece[Logprob] | None) -> list[Event]:
        if piece is None:
            return []
        return [Text(piece.text, piece.entries, self.metrics() if self.request.metered else None)]

    # --- end and restart

    @property
    def dropped(self) -> bool:
        """True if the request must be removed: it has ended, or its client has left."""
        return self.done or self.request.cancelled

    @property
    def has_ended(self) -> bool:
        """True if the answer ended normally: not by an error, and not because the client left."""
        return self.done and self.life.outcome in ("done", "length")

    def _finish(self, reason: DoneReason) -> list[Event]:
        rest = self._text(self.text.finish())
        if self.text.stopped:
            reason = DoneReason.STOP
        self._end("done" if reason is DoneReason.STOP else "length")
        return [*rest, Finished(reason, self.metrics())]

    def fail(self, error: Exception) -> list[Event]:
        """Ends the request with `error`; call this in the `except` block. Returns the events for the client."""
        if isinstance(error, RequestError):  # the fault is in the request
            return self.abort(str(error))
        log.exception("a request failed", request=self.request.number)
        self._end("failed")
        return [Failed(exception_line(error))]

    def note_forward(self, error: Exception) -> None:
        """Notes an error of a forward. Unless the error is a RequestError, the layers are lost."""
        self.session.failed |= not isinstance(error, RequestError)

    def abort(self, text: str) -> list[Event]:
        """Ends the request with `text` as its error. Returns the events for the client."""
        log.warning("a request cannot go on", request=self.request.number, why=text)
        self._end("failed")
        return [Failed(text)]

    def return_to_prefill(self) -> None:
        """Returns to prefill, as the layers lack recorded tokens. Afterwards the answer decodes alone."""
        self.may_batch = False
        self.restart_grammar()
        if self._sampler is not None:
            self._sampling = self._sampler.options
            self._sampler = None

    def restart(self, session: Session) -> None:
        """Continues in the new `session` of the same prompt; the former session must be closed. The tokens generated so
        far are prefilled like the prompt."""
        session.recorded += self.session.recorded[self.session.total :]
        self.session = session
        self.media.close()
        self.restarted = True
        self.return_to_prefill()

    def close(self) -> None:
        """Gives the computed layers to the cache, unless they are lost. Later calls do nothing. This waits for a
        running forward, so deliver the last events to the client first."""
        if not self.done:
            self._end("cancelled")
        self.grammar.close()
        self.media.close()
        if self.drafter is not None:
            self.drafter.close()
        self.session.close()

    def metrics(self) -> Metrics:
        """Returns the counters so far, in tokens and nanoseconds."""
        life, session = self.life, self.session
        now = life.ended_ns or perf_counter_ns()
        decoded = life.decoded_ns or now
        return Metrics(
            prompt_eval_count=session.total,
            prompt_eval_cached_count=session.cached,
            prompt_eval_duration=decoded - life.started_ns,
            eval_count=life.generated,
            eval_duration=now - decoded,
        )

    def _end(self, outcome: str) -> None:
        self.done = True
        self.life.outcome = outcome
        self.life.ended_ns = self.life.ended_ns or perf_counter_ns()


Results: TypeAlias = list[tuple[Generation, list[Event]]]
"""Generations, each with the new events for its client."""
