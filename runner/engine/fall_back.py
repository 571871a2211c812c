"""The way of an answer out of a batch that has failed."""

from runner.engine.events import Event
from runner.engine.generation import Generation
from runner.sampling.sample import Sample


def fall_back(generation: Generation, own: Sample | None, error: Exception, patience_s: float) -> list[Event]:
    """Lets an answer go back to what its own layers have seen, to go on alone; it fails if these are lost.

    It takes the token that it drew on them, if it has not: `own`. It waits `patience_s` for its grammar. Returns the
    events for the client.
    """
    # Without a token to take, its layers must not have seen the token that it would go back to.
    seen_all = own is None and generation.session.position >= len(generation.session.recorded)
    if generation.session.failed or seen_all:
        return generation.fail(error)
    events: list[Event] = []
    try:
        if own:
            generation.restart_grammar()
            generation.grammar.advance(choice := own.read()[0])
            if generation.grammar.wait(patience_s):
                events += generation.take(generation.with_forced(choice, alone=False))
            else:
                events += generation.abort("its grammar takes too long to be followed again")
        if not generation.done:
            generation.return_to_prefill()
    except Exception as fault:
        events += generation.fail(fault)
    return events
