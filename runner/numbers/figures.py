"""The figures of one request, computed from the times and counts in its `Lifecycle`."""

from typing import TYPE_CHECKING

from protocol.stats import RunningRequest

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.lifecycle import Lifecycle
    from runner.engine.request import Request


def waited_s(life: "Lifecycle") -> float:
    """Returns the seconds from the request's arrival to the start of its computation."""
    return (life.computed_ns - life.arrived_ns) / 1e9


def ttft_s(life: "Lifecycle") -> float:
    """Returns the seconds from the request's arrival to its first token or, without any token, to its end."""
    return ((life.first_token_ns or life.ended_ns) - life.arrived_ns) / 1e9


def prefill_rate(generation: "Generation") -> float:
    """Returns the prompt tokens that were computed per second, or 0 while the prompt is being computed."""
    life, session = generation.life, generation.session
    return _rate(session.total - session.cached, life.computed_ns, life.decoded_ns) if life.decoded_ns else 0.0


def decode_rate(life: "Lifecycle", until_ns: int) -> float:
    """Returns the generated tokens per second between the first token and `until_ns`. The first does not count."""
    return _rate(life.generated - 1, life.first_token_ns, until_ns)


def _rate(tokens: int, since_ns: int, until_ns: int) -> float:
    return max(0, tokens) / (max(1, until_ns - since_ns) / 1e9)


def restored(generation: "Generation") -> int:
    """Returns the number of the request's cached tokens that were restored from disk for it."""
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
    """Returns the seconds from `since_ns` to `now_ns`, rounded to a millisecond."""
    return round((now_ns - since_ns) / 1e9, 3)
