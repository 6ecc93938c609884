"""The public names of the package."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

import headrace
from headrace import _public


def test_all_lists_the_public_names() -> None:
    visible = {
        name
        for name, value in vars(_public).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(headrace.__all__) == headrace.__all__
    assert set(headrace.__all__) == visible
    assert all(getattr(headrace, name) is getattr(_public, name) for name in headrace.__all__)


def test_importing_the_package_is_cheap() -> None:
    assert not loaded_by("import headrace, headrace.errors") & {"numpy", "msgspec", "pydantic"}


def test_a_module_of_the_package_is_an_attribute_of_it() -> None:
    assert headrace.layouts is importlib.import_module("headrace.layouts")
    assert "numpy" in loaded_by("import headrace; headrace.layouts")


def test_dir_lists_the_public_names() -> None:
    assert set(headrace.__all__) < set(dir(headrace))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headrace' has no attribute 'Learner'"):
        headrace.Learner  # noqa: B018
    assert not hasattr(headrace, "layouts.padded")
    with pytest.raises(ImportError, match="cannot import name 'Learner' from 'headrace'"):
        exec("from headrace import Learner")


def test_importing_the_contract_imports_no_service_code_and_no_extra() -> None:
    loaded = loaded_by("from headrace import *")
    assert {"headrace", "numpy", "msgspec", "pydantic"} <= loaded
    assert not loaded & {"headrace_workers", "headrace_orchestrator", "aiohttp", "google_crc32c", "starlette", "torch"}


def test_adapters_for_trainers_import_no_trainer() -> None:
    loaded = loaded_by("from headrace.integrations import prompts, skyrl, trl, trl_grpo")
    assert not loaded & {"trl", "torch", "safetensors", "transformers", "aiohttp"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded in a fresh interpreter after the statement."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.split())
