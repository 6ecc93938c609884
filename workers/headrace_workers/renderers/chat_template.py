"""Chat template of a model, rendered as by the ``transformers`` package.

* Same Jinja settings, filters and variables as ``transformers``, so the text is identical.
* A template runs in a Jinja sandbox: it computes text and has no other access.
* A template that refuses a conversation is a failure with the template's reason in its message.
* The date in a template comes from the injected clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import InfrastructureFailure
from headrace_workers.renderers.control_tokens import SEPARATOR

_ESCAPED_SEPARATOR = json.dumps(SEPARATOR).strip('"')

TemplateMessage = Mapping[str, Any]
"""A message in the form that templates read: ``role``, ``content``, and optional further keys."""


class ChatTemplate:
    """Templates of one tokenizer. ``variables`` are the special tokens by name and the run spec's options."""

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, Any], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises InfrastructureFailure ``no-chat-template`` or ``template-unreadable``."""
        if "default" not in templates:
            raise InfrastructureFailure(
                "The tokenizer has no chat template.",
                hint="Put a chat_template.jinja into its folder, or choose the renderer of a model family.",
                kind="no-chat-template",
                retryable=False,
            )
        environment = _environment(now)
        try:
            compiled = {name: environment.from_string(text) for name, text in templates.items()}
        except TemplateError as error:
            raise InfrastructureFailure(
                f"The chat template is not valid Jinja: {error}", kind="template-unreadable", retryable=False
            ) from error
        for template in compiled.values():
            template.globals = dict(template.globals)  # each rendering copies it, and a plain dict is fastest to copy
        self._default = compiled["default"]
        self._with_tools = compiled.get("tool_use", self._default)
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] = (), *, generation_prompt: bool
    ) -> str:
        """Render a conversation to text. Raises InfrastructureFailure ``template-refused``."""
        variables: dict[str, Any] = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self._variables,
        }
        try:
            return (self._with_tools if tools else self._default).render(variables)
        except Exception as error:  # a template can raise any error
            raise InfrastructureFailure(
                f"The chat template refuses a conversation of {_roles(messages)}: {error}",
                hint="Let the environment use roles, and an order of messages, that the model's template accepts.",
                kind="template-refused",
                retryable=False,
            ) from error


def _roles(messages: Sequence[TemplateMessage]) -> str:
    return ", ".join(str(message["role"]) for message in messages[:8]) + (", …" if len(messages) > 8 else "")


class _GenerationTag(Extension):
    """The tag ``{% generation %}``, which marks an assistant's text; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format_: now().strftime(format_)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter ``tojson`` without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_ESCAPED_SEPARATOR, SEPARATOR) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
