"""Known choices: the beginning of an answer that is taken without a forward, because the cache knows what it would be.

Only plain greedy answers begin so: each token is the most probable one, whatever was drawn before, and nobody wants its
probability. The end of an answer is always computed: the token that ends it, the one that completes a stop string, the
last one that it may have. So answers end, and leave the cache, as they would without.
"""

from time import perf_counter_ns

from runner.cache import Cache
from runner.cache.session import LiveSession
from runner.engine.context import EngineContext
from runner.engine.events import Event
from runner.engine.generation import Generation
from runner.engine.request import Request

_PIECE_TOKENS = 64
"""Of one slice, and of one line to the client: they take less than a millisecond."""


def open_session(cache: Cache, request: Request, context: EngineContext) -> LiveSession:
    """Opens a session. If the answer is a plain greedy one, its tokens will be known choices; if, moreover, nobody
    wants their probabilities, it begins with those that the cache knows."""
    if request.sampling.greedy and request.grammar is None:
        most = 0 if request.sampling.logprobs else request.max_tokens - 1
        session = cache.begin_greedy(request.keys, most, context.tokenizer.eos, context.salt)
    else:
        session = cache.begin(request.keys, context.salt)
    assert isinstance(session, LiveSession)
    return session


def take_known(generation: Generation) -> list[Event]:
    """Gives a generation the next of its known tokens. Returns the events for the client."""
    session, life = generation.session, generation.life
    life.decoded_ns = life.decoded_ns or perf_counter_ns()
    coming = session.known[:_PIECE_TOKENS]
    count = generation.text.before_stop(coming)
    events = generation.push(coming[:count])
    life.known += count
    del session.known[:count]
    if count < len(coming) or not session.known:
        session.end_known()
    return events
