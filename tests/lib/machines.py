"""How the state machines of these tests are run."""

from hypothesis import HealthCheck, Phase, settings


def limits(examples: int, steps: int, *, derandomize: bool, shrink: bool = True) -> settings:
    """So many stories of so many steps, however long they take; nothing is remembered from run to run."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
