"""Tokenizer of a model's folder: vocabulary, special tokens, chat templates, end-of-turn ids.

* It is read from a local folder, or from the model hub by name; a model's code is never run.
* Truncation and padding set in ``tokenizer.json`` are disabled: a text is encoded completely.
* The vocabulary is as large as the model's, so every id that the engine can sample is valid.
* The fingerprint covers the vocabulary, the special tokens and the templates, and nothing else in the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import InfrastructureFailure

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

TOKENIZER_FILE = "tokenizer.json"

FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
)
"""Files fetched from the hub. They do not include weights."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates refer to by name."""


SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters in a ``generation_config.json`` that servers use as defaults."""

_NULL = msgspec.Raw(b"null")


class _Definition(msgspec.Struct):
    """The parts of a tokenizer.json that define the ids, as raw JSON: decoded, a large vocabulary would be a million
    objects."""

    added_tokens: msgspec.Raw = _NULL
    normalizer: msgspec.Raw = _NULL
    pre_tokenizer: msgspec.Raw = _NULL
    post_processor: msgspec.Raw = _NULL
    decoder: msgspec.Raw = _NULL
    model: msgspec.Raw = _NULL


class FolderTokenizer:
    """A tokenizer with its templates. It implements the interface that the package ``renderers`` expects."""

    def __init__(self, name: str, folder: Path) -> None:
        """Read ``folder``. Raises InfrastructureFailure ``tokenizer-missing``, ``tokenizer-unreadable``, or
        ``missing-extra``."""
        self.name_or_path = name
        self._definition_digest = _definition_digest(folder / TOKENIZER_FILE)
        self._backend = _backend(folder / TOKENIZER_FILE)
        config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        """Special tokens by the names that templates use."""
        self.templates = _templates(folder, config)
        """Chat templates by name. The main one is ``default``."""
        ids = self._backend.get_vocab(with_added_tokens=True)
        self._model_config = _read_json(folder / "config.json")
        self.vocab_size = max(_vocab_size(self._model_config), max(ids.values()) + 1)
        self.unk_token_id = self._id_of("unk_token")
        self.eos_token_id = self._id_of("eos_token")
        generation_config = _read_json(folder / "generation_config.json")
        self.eos_token_ids = list(
            dict.fromkeys([*_ids(self.eos_token_id), *_ids(generation_config.get("eos_token_id"))])
        )
        """Ids that end a turn according to the model's files, the tokenizer's first."""
        self.sampling_defaults = {
            name: generation_config[name] for name in SAMPLING_DEFAULTS if generation_config.get(name) is not None
        }
        """Sampling parameters of the model's files, which servers use for requests without them."""
        self._added = {id_: token for id_, token in self._backend.get_added_tokens_decoder().items() if token.content}
        self.added_tokens = {token.content: id_ for id_, token in self._added.items()}
        """Ids of the tokens that an encoding never splits."""
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        """Ids of the added tokens that the tokenizer marks as special."""

    @property
    def image_token_id(self) -> int | None:
        """Id of the image placeholder, if the model's configuration names one."""
        values = [self._model_config.get(key) for key in ("image_token_id", "image_token_index")]
        return next((value for value in values if isinstance(value, int)), None)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text; special tokens written in it become their ids, as in a template's text."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text; return the ids, and for each the positions of its characters in the text."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def text_encoder(self, excluded: Collection[int], anchor: str) -> Callable[[str], list[int]]:
        """Make an encoder to which the added tokens ``excluded`` are ordinary text. At the start of a text, ``anchor``
        is one token, with an arbitrary id."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        encoder = Backend(self._backend.model)
        if self._backend.normalizer is not None:
            encoder.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            encoder.pre_tokenizer = self._backend.pre_tokenizer
        kept = {id_: token for id_, token in self._added.items() if id_ not in excluded}
        encoder.add_tokens(list(kept.values()))
        encoder.add_special_tokens([AddedToken(anchor, normalized=False)])
        ids = {encoder.token_to_id(token.content): id_ for id_, token in kept.items()}
        return lambda text: [ids.get(id_, id_) for id_ in encoder.encode(text, add_special_tokens=False).ids]

    def normalizer_of(self, token_ids: Iterable[int]) -> Callable[[str], str] | None:
        """The normalization of a text before some of these added tokens are found in it; None if there is none."""
        normalizer = self._backend.normalizer
        if normalizer is None or not any(self._added[id_].normalized for id_ in token_ids):
            return None
        return lambda text: str(normalizer.normalize_str(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode ids to text. Invalid UTF-8 becomes U+FFFD; ids without a text are skipped."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the unknown token's id; a list for a list."""
        if isinstance(tokens, str):
            id_ = self._backend.token_to_id(tokens)
            return self.unk_token_id if id_ is None else id_
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def fingerprint(self, *more: Any) -> str:
        """Return the SHA-256 of the definition of the ids and of ``more`` JSON-serializable data."""
        value = [self._definition_digest, self.special_tokens, self.templates, more]
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if isinstance(token, str) else None


def load_tokenizer(name: str) -> FolderTokenizer:
    """Load a tokenizer from a folder or, by the model's name, from the hub. Raises InfrastructureFailure
    ``tokenizer-missing``, ``tokenizer-unreachable``, ``tokenizer-unreadable`` or ``missing-extra``."""
    path = Path(name).expanduser()
    if path.is_dir():
        return FolderTokenizer(name, path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise _missing_error(f"The folder {name!r} does not exist on this worker.")
    return FolderTokenizer(name, _fetch(name))


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    except ImportError as error:
        raise missing_extra(error) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _missing_error(f"{name!r} is neither a model on the hub nor a folder on this worker.") from error
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        raise InfrastructureFailure(
            f"The tokenizer of {name!r} cannot be fetched from the hub: {type(error).__name__}: {error}",
            hint="Set policy.tokenizer to a folder that exists on every worker, or give the workers access to the hub.",
            kind="tokenizer-unreachable",
            retryable=True,
        ) from error


def missing_extra(error: ImportError) -> InfrastructureFailure:
    """Failure of a worker without the packages that renderers need."""
    return InfrastructureFailure(
        f"This worker lacks the package {error.name!r}, which reads tokenizers and chat templates.",
        hint="Run: pip install 'headrace[renderers]'",
        kind="missing-extra",
        retryable=False,
    )


def _missing_error(detail: str) -> InfrastructureFailure:
    return InfrastructureFailure(
        detail,
        hint="Set policy.tokenizer to the path of the model's folder on the workers, or to its name on the hub.",
        kind="tokenizer-missing",
        retryable=False,
    )


def _unreadable_error(path: Path, error: Exception) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"{path} cannot be read: {error}", hint="Download the file again.", kind="tokenizer-unreadable", retryable=False
    )


def _definition_digest(path: Path) -> str:
    """Digest of the parts of a tokenizer.json that define the ids."""
    try:
        definition = msgspec.json.decode(path.read_bytes(), type=_Definition)
    except FileNotFoundError as error:
        raise _missing_error(f"{path.parent} has no {path.name}; convert a tokenizer in an older format.") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable_error(path, error) from error
    return hashlib.sha256(msgspec.json.encode(definition)).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if the file does not exist."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unreadable_error(path, error) from error
    if not isinstance(value, dict):
        raise _unreadable_error(path, ValueError("it is not a JSON object"))
    return value


def _backend(path: Path) -> Backend:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise missing_extra(error) from error
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise _unreadable_error(path, error) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(config: dict[str, Any], mapped: dict[str, Any]) -> dict[str, Any]:
    names = [*NAMED_TOKENS, *(key for key in config if key.endswith("_token") and key not in NAMED_TOKENS)]
    tokens: dict[str, Any] = {}
    for name in names:
        text = _token_text(config.get(name, mapped.get(name)))
        if text is not None:
            tokens[name] = text
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens |= {name: text for name, value in extra.items() if (text := _token_text(value)) is not None}
    return tokens


def _token_text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A template file takes precedence over the configuration."""
    configured = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates = {str(item["name"]): str(item["template"]) for item in configured}
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))]
    for name, path in files:
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _vocab_size(config: dict[str, Any]) -> int:
    """Vocabulary size in the model's configuration; 0 if absent."""
    sizes = [config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
