"""The figures of one request, from its times and counts."""

from typing import TYPE_CHECKING

from protocol.stats import RunningRequest

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.lifecycle import Lifecycle
    from runner.engine.request import Request


def waited_s(life: "Lifecycle") -> float:
    """Returns the seconds from arrival to the start of the computation."""
    return (life.computed_ns - life.arrived_ns) / 1e9


def ttft_s(life: "Lifecycle") -> float:
    """Returns the seconds from arrival to the first token, or to the end of a request without tokens."""
    return ((life.first_token_ns or life.ended_ns) - life.arrived_ns) / 1e9


def prefill_rate(generation: "Generation") -> float:
    """Returns the computed tokens of the prompt per second; 0 before the end of the prompt."""
    life, session = generation.life, generation.session
    return _rate(session.total - session.cached, life.computed_ns, life.decoded_ns) if life.decoded_ns else 0.0


def decode_rate(life: "Lifecycle", until_ns: int) -> float:
    """Returns the tokens per second of the answer after its first token."""
    return _rate(life.generated - 1, life.first_token_ns, until_ns)


def _rate(tokens: int, since_ns: int, until_ns: int) -> float:
    return max(0, tokens) / (max(1, until_ns - since_ns) / 1e9)


def restored(generation: "Generation") -> int:
    """Returns the number of cached tokens that were read from disk for the request."""
    return min(generation.request.restored, generation.session.cached)


def queued_figures(request: "Request", now_ns: int) -> RunningRequest:
    """Returns the figures of a request that waits in the queue."""
    return RunningRequest(
        number=request.number,
        phase="queued",
        prompt=len(request.prompt),
        max_tokens=request.max_tokens,
        age_s=seconds_between(request.arrived_ns, now_ns),
    )


def running_figures(generation: "Generation", now_ns: int) -> RunningRequest:
    """Returns the figures of a request that has a session."""
    request, session, life = generation.request, generation.session, generation.life
    prefilled = min(session.position, session.total)
    if life.decoded_ns:
        phase, prefilled, rate = "decode", session.total, decode_rate(life, now_ns)
    else:
        phase = "prefill" if generation.left or generation.grammar.compiled else "grammar"
        rate = _rate(prefilled - session.cached, life.computed_ns, now_ns)
    return RunningRequest(
        number=request.number,
        phase=phase,
        prompt=session.total,
        cached=session.cached,
        restored=restored(generation),
        prefilled=prefilled,
        generated=life.generated,
        max_tokens=request.max_tokens,
        age_s=seconds_between(request.arrived_ns, now_ns),
        tokens_per_s=round(rate, 2),
        ttft_s=ttft_s(life) if life.first_token_ns else None,
    )


def seconds_between(since_ns: int, now_ns: int) -> float:
    """Returns the time between, rounded to a millisecond."""
    return round((now_ns - since_ns) / 1e9, 3)
