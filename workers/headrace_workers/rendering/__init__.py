"""Renderers: messages to token ids, sampled ids back to text."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InfrastructureFailure
from headrace_workers.rendering.base import Renderer, text_of
from headrace_workers.rendering.bytes_renderer import BytesRenderer

RENDERERS: dict[str, Callable[[], Renderer]] = {"bytes": BytesRenderer}
"""Renderers by the name that a run spec gives."""


def make_renderer(name: str) -> Renderer:
    """The renderer of that name. Raises InfrastructureFailure ``unknown-renderer``."""
    factory = RENDERERS.get(name)
    if factory is None:
        raise InfrastructureFailure(
            f"This worker knows no renderer {name!r}.",
            hint=f"Known here: {', '.join(sorted(RENDERERS))}. Set policy.renderer in the run spec to one of them.",
            kind="unknown-renderer",
            retryable=False,
        )
    return factory()


__all__ = ["RENDERERS", "BytesRenderer", "Renderer", "make_renderer", "text_of"]
