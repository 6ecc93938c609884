"""Control tokens of a model, and the texts that spell them.

* A control token that a text spells is encoded as text: only the template and the policy make control tokens.
* A text that spells no control token has the ids that the tokenizer gives it.
* Tokens of words and spaces, such as ``user`` or a run of spaces, are not control tokens.
* Control tokens that the policy sampled stay as they were sampled; those that it spelled stay text.

A *separated* text has ``SEPARATOR`` inside each control token that it spells. It passes through a chat template like
any other text. Encoding it removes the separators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from headrace.trajectory import ContentPart, Message
from headrace_workers.renderers.base import AssistantTurn, part_text
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer

SEPARATOR = "\ufdd0"
"""A character that Unicode reserves for internal use. A text that contains it has it twice when it is separated."""

_ANCHOR = SEPARATOR * 3
"""A token to put before a text, since some tokenizers begin the first text with a space."""

_SEPARATORS = re.compile(f"{SEPARATOR}({SEPARATOR}?)")


def joined(text: str) -> str:
    """Return a separated text without its separators."""
    return _SEPARATORS.sub(r"\1", text)


def joined_json(value: Any) -> Any:
    """Return a JSON value with separated texts without their separators."""
    if isinstance(value, str):
        return joined(value)
    if isinstance(value, dict):
        return {joined_json(key): joined_json(item) for key, item in value.items()}
    return [joined_json(item) for item in value] if isinstance(value, list) else value


class ControlTokens:
    """The control tokens of a tokenizer: those that it marks as special, and those that the template writes.

    ``turn_ids``: the ids in a plain rendered conversation; they begin and end turns. An assistant's text from outside
    may contain the other ones, such as ``<think>``.
    """

    def __init__(self, tokenizer: FolderTokenizer, turn_ids: Iterable[int], template_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        turn, template = {*tokenizer.special_ids, *tokenizer.eos_token_ids, *turn_ids}, set(template_ids)
        # A token of one character cannot be separated.
        texts = {
            id_: text
            for text, id_ in tokenizer.added_tokens.items()
            if len(text) > 1 and (id_ in tokenizer.special_ids or not _is_words(text))
        }
        sources = tokenizer.templates.values()
        self._texts = {
            id_: text
            for id_, text in texts.items()
            if id_ in turn or id_ in template or any(text in source for source in sources)
        }
        self._all = _SpelledTokens(tokenizer, self._texts)
        self._turns = _SpelledTokens(tokenizer, {id_: text for id_, text in self._texts.items() if id_ in turn})
        self._added_ids = frozenset(tokenizer.added_tokens.values())
        self._encode_text: Callable[[str], list[int]] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the control tokens."""
        return list(self._texts.values())

    # Separating

    def separate_text(self, message: Message) -> str:
        """The separated text of a message. Parts with ``control_tokens`` are not separated. Raises
        InfrastructureFailure ``image-without-text``."""
        spelled = self._spelled_in(message)
        if isinstance(message.content, str):
            return spelled.separate(message.content)
        return "".join(
            _escape(text) if allowed else spelled.separate(text)
            for allowed, text in _texts_by_permission(message.content)
        )

    def separate_parts(self, message: Message) -> list[ContentPart]:
        """The parts of a message with separated texts."""
        content, spelled = message.content, self._spelled_in(message)
        if isinstance(content, str):
            return [ContentPart(type="text", text=spelled.separate(content))]
        separated: list[ContentPart] = []
        for outside, run in groupby(content, lambda part: part.type == "text" and not part.control_tokens):
            parts = list(run)
            parts, separate = (_merged(parts, spelled), spelled.separate) if outside else (parts, _escape)
            separated += [msgspec.structs.replace(part, text=separate(part.text)) for part in parts]
        return separated

    def separate_turn(self, turn: AssistantTurn, stops: Container[int]) -> str:
        """The separated text of a sampled turn, without separators in the control tokens that were sampled. A last id
        of ``stops`` is not in the text."""
        text, token_ids = turn.text, turn.token_ids
        spelled = self._all.count(text)
        if not spelled:
            return _escape(text)
        if token_ids[-1] in stops:
            token_ids = token_ids[:-1]
        if spelled == sum(map(self._texts.__contains__, token_ids)):
            return _escape(text)
        pieces = [
            (is_control, self._tokenizer.decode(list(run)))
            for is_control, run in groupby(token_ids, self._texts.__contains__)
        ]
        if "".join(piece for _, piece in pieces) != text:
            return self._all.separate(text)  # this tokenizer decodes a part of a text differently
        return "".join(_escape(piece) if is_control else self._all.separate(piece) for is_control, piece in pieces)

    def separate_action(self, text: str) -> str:
        """The separated text of a turn whose ids are unknown."""
        return self._turns.separate(text)

    def separate_json(self, value: Any) -> Any:
        """The JSON value with separated keys and texts."""
        if isinstance(value, str):
            return self._all.separate(value)
        if isinstance(value, Mapping):
            return {self.separate_json(key): self.separate_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.separate_json(item) for item in value]
        return value

    # Counting

    def count(self, value: Message | Any) -> int:
        """The number of control tokens that a message, or a JSON value, spells and that are encoded as text."""
        if isinstance(value, str):
            return self._all.count(value)
        if isinstance(value, Mapping):
            return sum(self.count(key) + self.count(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return sum(map(self.count, value))
        return self._count_in(value) if isinstance(value, Message) else 0

    def _count_in(self, message: Message) -> int:
        spelled = self._spelled_in(message)
        if isinstance(message.content, str):
            return spelled.count(message.content)
        runs = groupby(message.content, lambda part: part.control_tokens)
        return sum(spelled.count("".join(part.text for part in run)) for allowed, run in runs if not allowed)

    def _spelled_in(self, message: Message) -> _SpelledTokens:
        return self._turns if message.role == "assistant" else self._all

    # Encoding

    def encode(self, text: str) -> list[int]:
        """Encode a separated text."""
        if SEPARATOR not in text:
            return self._tokenizer.encode(text)
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        encoded: list[int] = []
        first, start = 0, 0
        # An added token may also stand for separators, as one for unknown characters does.
        tokens = (
            at for at, id_ in enumerate(ids) if id_ in self._added_ids and SEPARATOR not in text[slice(*offsets[at])]
        )
        for position in [*tokens, len(ids)]:
            before, after = offsets[position] if position < len(ids) else (len(text), len(text))
            piece = text[start:before]
            encoded += self._encode_piece(joined(piece), start == 0) if SEPARATOR in piece else ids[first:position]
            encoded += ids[position : position + 1]
            first, start = position + 1, after
        return encoded

    def _encode_piece(self, text: str, is_first: bool) -> list[int]:
        """Encode the text between two tokens as text."""
        if self._encode_text is None:
            self._encode_text = self._tokenizer.text_encoder(self._texts.keys(), _ANCHOR)
        ids = self._encode_after_token(text, is_first)
        if _ANCHOR not in text and self._texts.keys().isdisjoint(ids):
            return ids
        # The tokenizer's model has a control token among its words; no single character is one.
        return [id_ for at, one in enumerate(text) for id_ in self._encode_after_token(one, is_first and at == 0)]

    def _encode_after_token(self, text: str, is_first: bool) -> list[int]:
        assert self._encode_text is not None
        return self._encode_text(text) if is_first else self._encode_text(_ANCHOR + text)[1:]


class _SpelledTokens:
    """Finds tokens that a text spells."""

    def __init__(self, tokenizer: FolderTokenizer, texts: Mapping[int, str]) -> None:
        longest_first = sorted(texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._normalize = tokenizer.normalizer_of(texts.keys())

    def count(self, text: str) -> int:
        count = len(self._pattern.findall(text))
        return count if count or self._normalize is None else len(self._pattern.findall(self._normalize(text)))

    def separate(self, text: str) -> str:
        text = _escape(text)
        while self._pattern.search(text):  # without one token, the text may spell another that overlapped it
            text = self._pattern.sub(lambda found: SEPARATOR.join(found[0]), text)
        if self._normalize is not None and self._pattern.search(self._normalize(text)):
            return SEPARATOR.join(text)
        return text


def _is_words(text: str) -> bool:
    return all(character.isalnum() or character.isspace() for character in text)


def _escape(text: str) -> str:
    return text.replace(SEPARATOR, SEPARATOR * 2) if SEPARATOR in text else text


def _texts_by_permission(parts: Sequence[ContentPart]) -> list[tuple[bool, str]]:
    runs = groupby(parts, lambda part: part.control_tokens)
    return [(allowed, "".join(map(part_text, run))) for allowed, run in runs]


def _merged(parts: list[ContentPart], spelled: _SpelledTokens) -> list[ContentPart]:
    """The parts, or a single one if a token begins in one part and ends in another."""
    text = "".join(part.text for part in parts)
    if len(parts) > 1 and spelled.count(text) != sum(spelled.count(part.text) for part in parts):
        return [ContentPart(type="text", text=text)]
    return parts
