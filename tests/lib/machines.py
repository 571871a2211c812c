"""The settings of the state machines in these tests."""

from hypothesis import HealthCheck, Phase, settings


def limits(examples: int, steps: int, *, derandomize: bool, shrink: bool = True) -> settings:
    """Returns settings for `examples` stories of `steps` steps, without a deadline or a memory of earlier runs."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
