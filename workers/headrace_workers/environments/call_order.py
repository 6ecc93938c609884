"""Error for calling an environment out of order."""

from __future__ import annotations

from headrace.errors import EnvironmentFailure


def out_of_order_error(environment: object) -> EnvironmentFailure:
    """Failure to raise when ``step`` is called before ``reset`` or after the end."""
    return EnvironmentFailure(
        f"{type(environment).__name__}.step was called while no episode is running.",
        kind="step-out-of-order",
        retryable=False,
        hint="Call reset(seed) first, and again after each episode.",
    )
