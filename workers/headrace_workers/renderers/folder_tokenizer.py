"""A tokenizer as a model's folder holds it: vocabulary, special tokens, chat templates, ids that end a turn.

* It is read from a local folder, or from the model hub by name; never is code of a model run.
* Truncation and padding that a ``tokenizer.json`` may ask for are switched off: what is encoded is encoded whole.
* The vocabulary is as large as the model's own, so that whatever the engine can sample is a known id.
* The fingerprint covers the vocabulary, the special tokens and the templates, and nothing else of the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
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
"""What is fetched of a model: nothing of its weights."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates refer to by name."""

EXTRA = "headrace[renderers]"


_NULL = msgspec.Raw(b"null")


class _Definition(msgspec.Struct):
    """The parts of a tokenizer.json that give an id its meaning, as they are written: read, they would be a million
    objects for a large vocabulary."""

    added_tokens: msgspec.Raw = _NULL
    normalizer: msgspec.Raw = _NULL
    pre_tokenizer: msgspec.Raw = _NULL
    post_processor: msgspec.Raw = _NULL
    decoder: msgspec.Raw = _NULL
    model: msgspec.Raw = _NULL


class FolderTokenizer:
    """A tokenizer with its templates. It has what the package ``renderers`` asks of one."""

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
        """Chat templates by name; ``default`` is the usual one."""
        ids = self._backend.get_vocab(with_added_tokens=True)
        self._model_config = _read_json(folder / "config.json")
        self.vocab_size = max(_vocab_size(self._model_config), max(ids.values()) + 1)
        self.unk_token_id = self._id_of("unk_token")
        self.eos_token_id = self._id_of("eos_token")
        self.eos_token_ids = list(
            dict.fromkeys(
                [*_ids(self.eos_token_id), *_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))]
            )
        )
        """Ids that end a turn by the model's own word, the tokenizer's first."""
        self.added_tokens = {
            token.content: id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.content
        }
        """Tokens that no encoding splits, with their ids."""

    @property
    def image_token_id(self) -> int | None:
        """The id that stands for an image, if the model's configuration names one."""
        named = [self._model_config.get(key) for key in ("image_token_id", "image_token_index")]
        return next((value for value in named if isinstance(value, int)), None)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text; marks in it become special tokens, as in a template's text."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD, and ids without a text nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, the id of the unknown one if there is no such token; a list for a list."""
        if isinstance(tokens, str):
            id_ = self._backend.token_to_id(tokens)
            return self.unk_token_id if id_ is None else id_
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def fingerprint(self, *more: Any) -> str:
        """SHA-256 of what gives the ids their meaning, and of ``more`` JSON-able data."""
        value = [self._definition_digest, self.special_tokens, self.templates, more]
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if isinstance(token, str) else None


def load_tokenizer(name: str) -> FolderTokenizer:
    """The tokenizer in that folder, or of the model of that name on the hub. Raises InfrastructureFailure
    ``tokenizer-missing``, ``tokenizer-unreachable``, ``tokenizer-unreadable`` or ``missing-extra``."""
    path = Path(name).expanduser()
    if path.is_dir():
        return FolderTokenizer(name, path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise _missing_error(f"There is no folder {name!r} on this worker.")
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
        raise _missing_error(f"The hub knows no model {name!r}, and there is no such folder.") from error
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        raise InfrastructureFailure(
            f"The tokenizer of {name!r} cannot be fetched from the hub: {type(error).__name__}: {error}",
            hint="Give policy.tokenizer a folder that every worker has, or let workers reach the hub.",
            kind="tokenizer-unreachable",
            retryable=True,
        ) from error


def missing_extra(error: ImportError) -> InfrastructureFailure:
    """The failure of a worker that lacks the packages of renderers."""
    return InfrastructureFailure(
        f"This worker lacks the package {error.name!r}, which reads tokenizers and chat templates.",
        hint=f"Run: pip install '{EXTRA}'",
        kind="missing-extra",
        retryable=False,
    )


def _missing_error(detail: str) -> InfrastructureFailure:
    return InfrastructureFailure(
        detail,
        hint="Set policy.tokenizer to the model's folder, as it is on the workers, or to its name on the hub.",
        kind="tokenizer-missing",
        retryable=False,
    )


def _unreadable_error(path: Path, error: Exception) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"{path} cannot be read: {error}", hint="Fetch the file anew.", kind="tokenizer-unreadable", retryable=False
    )


def _definition_digest(path: Path) -> str:
    """A digest of what gives the ids their meaning."""
    try:
        definition = msgspec.json.decode(path.read_bytes(), type=_Definition)
    except FileNotFoundError as error:
        raise _missing_error(
            f"There is no {path.name} in {path.parent}; a tokenizer in an older format has to be converted."
        ) from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable_error(path, error) from error
    return hashlib.sha256(msgspec.json.encode(definition)).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that need not be there."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unreadable_error(path, error) from error
    if not isinstance(value, dict):
        raise _unreadable_error(path, ValueError("it is no JSON object"))
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
    named = [*NAMED_TOKENS, *(key for key in config if key.endswith("_token") and key not in NAMED_TOKENS)]
    found: dict[str, Any] = {}
    for name in named:
        text = _token_text(config.get(name, mapped.get(name)))
        if text is not None:
            found[name] = text
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= {name: text for name, value in extra.items() if (text := _token_text(value)) is not None}
    return found


def _token_text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """A template in a file of its own comes before one in the configuration."""
    given = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates = {str(item["name"]): str(item["template"]) for item in given}
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))]
    for name, path in files:
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _vocab_size(config: dict[str, Any]) -> int:
    """That of the model; 0 if its configuration does not say."""
    sizes = [config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
