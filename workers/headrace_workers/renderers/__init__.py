"""Renderers: convert messages to token ids, and sampled ids to text."""

from __future__ import annotations

from headrace.errors import InfrastructureFailure
from headrace.runspec import PolicySpec
from headrace_workers.renderers.base import (
    AssistantTurn,
    ConversationItem,
    CurrentSegment,
    Prompt,
    Renderer,
    Tools,
)
from headrace_workers.renderers.bytes_renderer import BytesRenderer


def make_renderer(spec: PolicySpec) -> Renderer:
    """Make the renderer of a run. Reads files, and may fetch them from the hub. Raises InfrastructureFailure:
    ``unknown-renderer``, ``missing-extra``, ``tokenizer-…``, ``no-chat-template``, ``template-unreadable``,
    ``renderer-does-not-fit``."""
    if spec.renderer == "bytes":
        return BytesRenderer()
    # Imported here because these modules need an optional extra.
    from headrace_workers.renderers.family_renderer import FamilyRenderer, families, family_of
    from headrace_workers.renderers.folder_tokenizer import load_tokenizer, missing_extra

    try:
        from headrace_workers.renderers.template_renderer import TemplateRenderer
    except ImportError as error:
        raise missing_extra(error) from error
    family = spec.renderer if spec.renderer != "auto" else family_of(spec.tokenizer) or "template"
    if family == "template":
        return TemplateRenderer(load_tokenizer(spec.tokenizer), spec.renderer_options)
    if family not in (known := families()):
        raise InfrastructureFailure(
            f"This worker does not know the renderer {family!r}.",
            hint=f"Set policy.renderer in the run spec to one of: auto, bytes, template, {', '.join(known)}.",
            kind="unknown-renderer",
            retryable=False,
        )
    return FamilyRenderer(family, load_tokenizer(spec.tokenizer), spec.renderer_options)


__all__ = [
    "AssistantTurn",
    "BytesRenderer",
    "ConversationItem",
    "CurrentSegment",
    "Prompt",
    "Renderer",
    "Tools",
    "make_renderer",
]
