"""Renderers of model families, from the package ``renderers``, which implements each family's template by hand.

* A family is selected by its name; only ``auto`` selects one by the model's name, which must match exactly.
* The family's own bridge is used; without one, a full rendering if it begins with the current segment.
* The package's results are checked: a bridge that changes the current segment is not an extension.
* A sampled turn that cannot be parsed and rendered again without loss is plain text in a new segment.
* Text from outside is separated (see ``control_tokens``) before the family sees it, and so is a parsed turn.
* A turn on which the package's parser raises an error is an action with a call that cannot be read.
* A family that encodes texts by a package of its own, as ``gpt-oss`` does, gets them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from headrace.environment import Action, Call
from headrace.errors import InfrastructureFailure
from headrace.trajectory import Message, Tokenizer
from headrace_workers.renderers.base import AssistantTurn, ConversationItem, CurrentSegment, Prompt, Tools
from headrace_workers.renderers.control_tokens import SEPARATOR, ControlTokens, joined_json
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer, missing_extra
from headrace_workers.renderers.tool_calls import read_call

NOT_FAMILIES = frozenset({"auto", "default", "custom"})
"""Names in the package that are not families. For an unknown family use our renderer ``template``."""


class FamilyRenderer:
    """Renderer of a model family. ``options`` are the fields of the family's configuration."""

    image_token_id: int | None = None
    """Text only: rendering images would need the families' image processors."""

    def __init__(self, family: str, tokenizer: FolderTokenizer, options: Mapping[str, Any] | None = None) -> None:
        """Raises InfrastructureFailure ``renderer-does-not-fit`` or ``missing-extra``."""
        options = dict(options or {})
        self._tokenizer = tokenizer
        self._encoder = _FamilyTokenizer(tokenizer)
        self._renderer = _make_family_renderer(family, self._encoder, options)
        self.tokenizer = Tokenizer(
            name=tokenizer.name_or_path,
            fingerprint=tokenizer.fingerprint(family, version("renderers"), options),
            vocab_size=tokenizer.vocab_size,
        )
        self.stop_token_ids: Sequence[int] = tuple(self._renderer.get_stop_token_ids())
        self._generation_prompt = self._render([_USER], None, generation_prompt=True)[
            len(self._render([_USER], None, generation_prompt=False)) :
        ]
        self._control_tokens = ControlTokens(tokenizer, *self._probe_family())
        self._encoder.control_tokens = self._control_tokens
        probe = self._probe([{"role": "user", "content": f"a{SEPARATOR}b"}])
        self._encodes_itself = SEPARATOR in tokenizer.decode(probe)

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        messages = [self._to_message(item) for item in conversation]
        return Prompt(self._render(self._texts(messages), self._schemas(tools), generation_prompt=True))

    def extend(self, segment: CurrentSegment, new_messages: Sequence[Message]) -> Prompt | None:
        tokens = list(segment.token_ids)
        ids = self._bridge(segment, new_messages)
        if ids[: len(tokens)] != tokens:
            ids = self.start([*segment.conversation, *new_messages], segment.tools).new_ids
        return Prompt(ids[len(tokens) :]) if ids[: len(tokens)] == tokens else None

    def parse(self, sampled_ids: Sequence[int]) -> str:
        has_end = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        return self._tokenizer.decode(sampled_ids[:-1] if has_end else sampled_ids)

    def encode(self, text: str) -> list[int]:
        return [*self._control_tokens.encode(self._control_tokens.separate_action(text)), *self.stop_token_ids[:1]]

    def count_control_tokens(self, value: Message | Tools) -> int:
        return self._control_tokens.count(value)

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        # Text cut at a stop string is encoded again only for parsing; these ids are not stored.
        ids = list(sampled_ids) if text == self.parse(sampled_ids) else self._tokenizer.encode(text)
        parsed = self._parse(ids)
        if isinstance(parsed, Exception):
            error = f"the turn cannot be read: {type(parsed).__name__}"
            return Action(text, content="", calls=[Call(text=text, error=error)])
        calls = [_to_call(call) for call in parsed.tool_calls]
        return Action(text, content=parsed.content or "", reasoning=parsed.reasoning_content or "", calls=calls)

    def _parse(self, sampled_ids: Sequence[int]) -> Any:
        """Parse a turn with the family's parser. Returns its error, if the text of the turn makes it raise one."""
        try:
            return self._renderer.parse_response(list(sampled_ids), prompt_ids=self._generation_prompt)
        except Exception as error:  # noqa: BLE001 - the policy's text must not become a fault of the worker
            return error

    def _bridge(self, segment: CurrentSegment, new_messages: Sequence[Message]) -> list[int]:
        """The segment's ids and the next prompt, by the family's own rule; empty if it has none for this turn."""
        tokens, start = list(segment.token_ids), segment.turn_start
        messages = self._texts([self._message(item) for item in new_messages])
        try:
            bridged = self._renderer.bridge_to_next_turn(
                tokens[:start], tokens[start:], messages, tools=self._schemas(segment.tools)
            )
        except Exception:  # noqa: BLE001 - a full rendering reports what the family refuses
            return []
        return list(bridged.token_ids) if bridged is not None else []

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generation_prompt: bool
    ) -> list[int]:
        try:
            return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=generation_prompt))
        except Exception as error:  # a family can raise any error
            roles = ", ".join(str(message["role"]) for message in messages[:8])
            raise InfrastructureFailure(
                f"The renderer refuses a conversation of {roles}: {error}",
                hint="Let the environment use roles, and an order of messages, that the model's family accepts.",
                kind="template-refused",
                retryable=False,
            ) from error

    def _probe_family(self) -> tuple[list[int], list[int]]:
        """The ids of a plain conversation, and those of one with tools; none if the family refuses it."""
        turns = [_SYSTEM, _USER, {"role": "assistant", "content": "a"}, _USER]
        calls = [_call_object(0, "f", {"a": "b"})]
        acts = {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": calls}
        answer = {"role": "tool", "content": "b", "tool_call_id": calls[0]["id"], "name": "f"}
        schema = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
        plain, with_tools = (
            self._probe(turns),
            self._probe([_USER, acts, answer], [{"type": "function", "function": schema}]),
        )
        return plain or self._probe(turns[1:]), with_tools

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        try:
            return self._render(messages, tools, generation_prompt=True)
        except InfrastructureFailure:
            return []

    def _to_message(self, item: ConversationItem) -> dict[str, Any]:
        return self._turn_message(item) if isinstance(item, AssistantTurn) else self._message(item)

    def _message(self, message: Message) -> dict[str, Any]:
        return {"role": message.role, "content": self._control_tokens.separate_text(message)}

    def _turn_message(self, reply: AssistantTurn) -> dict[str, Any]:
        separate = self._control_tokens.separate_json
        parsed = self._parse(reply.token_ids)
        if isinstance(parsed, Exception) or any(_to_call(call).error for call in parsed.tool_calls):
            text = self._control_tokens.separate_turn(reply, self.stop_token_ids)
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": separate(parsed.content)}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = separate(parsed.reasoning_content)
        if parsed.tool_calls:
            message["tool_calls"] = [
                _call_object(number, separate(call.name), separate(call.arguments), call.id)
                for number, call in enumerate(parsed.tool_calls)
            ]
        return message

    def _schemas(self, tools: Tools) -> list[dict[str, Any]] | None:
        return self._texts([self._control_tokens.separate_json(tool) for tool in tools]) or None

    def _texts(self, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The values with texts as the family reads them."""
        return [joined_json(value) for value in values] if self._encodes_itself else values


class _FamilyTokenizer:
    """The tokenizer that the package uses. It encodes separated texts."""

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self.control_tokens: ControlTokens | None = None
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id = tokenizer.unk_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if self.control_tokens is None or add_special_tokens:
            return self._tokenizer.encode(text, add_special_tokens)
        return self.control_tokens.encode(text)


_SYSTEM = {"role": "system", "content": "s"}
_USER = {"role": "user", "content": "u"}


def _call_object(number: int, name: str, arguments: Any, id_: str | None = None) -> dict[str, Any]:
    return {"type": "function", "id": id_ or f"call_{number}", "function": {"name": name, "arguments": arguments}}


def _to_call(call: Any) -> Call:
    if call.status != "ok":
        return Call(text=call.raw, name=call.name or "", error=f"the call cannot be read: {call.status}")
    return read_call(call.raw, {"name": call.name, "arguments": call.arguments})


def _make_family_renderer(family: str, tokenizer: _FamilyTokenizer, options: dict[str, Any]) -> Any:
    try:
        from renderers import base, configs
    except ImportError as error:
        raise missing_extra(error) from error
    try:
        config = type(configs.config_from_name(family)).model_validate({"name": family, **options})
        return base.create_renderer(tokenizer, config)
    except Exception as error:  # a family can raise any error
        raise InfrastructureFailure(
            f"The renderer {family!r} does not fit the tokenizer {tokenizer.name_or_path!r}: {error}",
            hint="Choose the family of the model, or policy.renderer = 'template'; check policy.renderer_options.",
            kind="renderer-does-not-fit",
            retryable=False,
        ) from error


def families() -> list[str]:
    """List the families that the package supports. Raises InfrastructureFailure ``missing-extra``."""
    try:
        from renderers import base

        base._populate_registry()
    except ImportError as error:
        raise missing_extra(error) from error
    return sorted(base.RENDERER_REGISTRY.keys() - NOT_FAMILIES)


def family_of(model: str) -> str | None:
    """Return the family of a model by its exact name on the hub; None if the package does not know it. Raises
    InfrastructureFailure ``missing-extra``."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise missing_extra(error) from error
    family = MODEL_RENDERER_MAP.get(model)
    return None if family is None else str(family)
