"""The public names of the contract."""

from __future__ import annotations

import subprocess
import sys
import types

import headrace


def test_all_is_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(headrace).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(headrace.__all__) == headrace.__all__
    assert set(headrace.__all__) == visible


def test_importing_the_contract_imports_no_service_code_and_no_extra() -> None:
    loaded = loaded_by("import headrace")
    assert {"headrace", "numpy", "msgspec", "pydantic"} <= loaded
    assert not loaded & {"headrace_workers", "headrace_orchestrator", "aiohttp", "google_crc32c", "starlette", "torch"}


def test_adapters_to_trainers_import_no_trainer() -> None:
    loaded = loaded_by("from headrace.integrations import prompts, skyrl, trl, trl_grpo")
    assert not loaded & {"trl", "torch", "safetensors", "transformers", "aiohttp"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after it."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())
