"""Weights of a folder in the real vLLM: exact or refused, named when they are in use, nothing stale."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_model import WEIGHTS, Tensors, read, write, write_adapter, write_model
from headrace.weight_files import weight_digest
from tests.vllm.server import TorchLogprobs, Vllm, logprobs_of

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

PROMPT = [*range(40, 52)]
CLOSE = 1e-3
"""Largest difference between logprobs of vLLM and of a PyTorch forward pass. Wrong weights differ by more than 1."""


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """Other weights of the same model."""
    write_model(tmp_path / "second", seed=1, tied=True)
    return tmp_path / "second"


def apart(choice: dict, prompt: list[int], reference: list[float], start: int = 0, end: int | None = None) -> float:
    """The largest difference over the sampled tokens [start, end)."""
    told = np.array(logprobs_of(choice))
    return float(np.abs(told - np.array(reference[len(prompt) - 1 :]))[start:end].max())


async def test_logprobs_are_those_of_a_pytorch_forward(vllm: Vllm, torch_logprobs: TorchLogprobs):
    prompts = [PROMPT, [5], [*range(256)], [7, 8, 9] * 50]
    choices = await asyncio.gather(*(vllm.generate(prompt, max_tokens=64, seed=3) for prompt in prompts))
    for prompt, choice in zip(prompts, choices, strict=True):
        reference = torch_logprobs(vllm.model, prompt + choice["token_ids"])
        assert apart(choice, prompt, reference) < CLOSE


async def test_weights_of_a_folder_are_loaded_exactly_including_tied_embeddings(
    vllm: Vllm, second: Path, torch_logprobs: TorchLogprobs
):
    before = await vllm.generate(PROMPT, max_tokens=32, temperature=0)
    await vllm.sync(second, "0.1")
    after = await vllm.generate(PROMPT, max_tokens=32, temperature=0)
    assert after["token_ids"] != before["token_ids"]
    tokens = PROMPT + after["token_ids"]
    assert apart(after, PROMPT, torch_logprobs(second, tokens)) < CLOSE
    assert apart(after, PROMPT, torch_logprobs(vllm.model, tokens)) > 1


async def test_a_version_is_reported_once_its_weights_are_in_use_and_labels_their_samples(vllm: Vllm, second: Path):
    assert await vllm.version() == "default"
    await vllm.post("/pause?mode=keep&clear_cache=true")
    await vllm.call("headrace_load", str(second))
    assert await vllm.version() == "default"
    await vllm.post("/update_weight_version", {"new_version": "2.17"})
    await vllm.post("/resume")
    assert await vllm.version() == "2.17"
    choice = await vllm.generate(PROMPT, max_tokens=5)
    assert choice["weight_versions"] == [{"version": "2.17", "start": 0, "end": 5}]


async def test_a_running_request_continues_with_the_new_weights_from_its_exact_tokens(
    vllm: Vllm, second: Path, torch_logprobs: TorchLogprobs
):
    asked = {"model": "policy", "token_ids": PROMPT, "stream": True}
    sampling = {"max_tokens": 600, "logprobs": 0, "seed": 1, "ignore_eos": True}
    ids: list[int] = []
    told: list[float] = []
    spans: list[dict] = []
    async with vllm.session.post(
        f"{vllm.address}/inference/v1/generate", json={**asked, "sampling_params": sampling}
    ) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                ids += choice["token_ids"] or []
                told += logprobs_of(choice) if choice["logprobs"] else []
                spans = choice.get("weight_versions") or spans
            if len(ids) >= 20 and await vllm.version() == "default":
                await vllm.sync(second, "0.1")
    assert [span["version"] for span in spans] == ["default", "0.1"]
    (old, new) = spans
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], len(ids))
    assert len(ids) == len(told) == 600
    assert new["start"] >= 20
    whole = {"logprobs": {"content": [{"logprob": logprob} for logprob in told]}}
    tokens = PROMPT + ids
    assert apart(whole, PROMPT, torch_logprobs(vllm.model, tokens), 0, old["end"]) < CLOSE
    assert apart(whole, PROMPT, torch_logprobs(second, tokens), new["start"]) < CLOSE


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_running_request_ends_with_its_tokens_on_abort_and_is_finished_on_wait(
    vllm: Vllm, second: Path, mode: str
):
    asked = asyncio.create_task(vllm.generate(PROMPT, max_tokens=300, ignore_eos=True))
    await vllm.until_sampling()
    await vllm.sync(second, "0.1", mode=mode)
    choice = await asked
    count = len(choice["token_ids"])
    assert (choice["finish_reason"], count == 300) == (("abort", False) if mode == "abort" else ("length", True))
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert len(logprobs_of(choice)) == count


async def test_no_cached_prefix_of_old_weights_is_used(vllm: Vllm, second: Path, torch_logprobs: TorchLogprobs):
    prompt = [*range(256)] * 3
    await vllm.generate(prompt, max_tokens=1)
    await vllm.sync(second, "0.1")
    choice = await vllm.generate(prompt, max_tokens=16)
    assert apart(choice, prompt, torch_logprobs(second, prompt + choice["token_ids"])) < CLOSE


def cut_short(folder: Path, tensors: Tensors) -> None:
    write(folder / WEIGHTS, tensors)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def one_missing(folder: Path, tensors: Tensors) -> None:
    tensors.pop("model.norm.weight")
    write(folder / WEIGHTS, tensors)


def one_more(folder: Path, tensors: Tensors) -> None:
    write(folder / WEIGHTS, {**tensors, "model.layers.2.mlp.up_proj.weight": tensors["model.norm.weight"]})


def another_shape(folder: Path, tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-8]
    write(folder / WEIGHTS, tensors)


def another_type(folder: Path, tensors: Tensors) -> None:
    write(folder / WEIGHTS, tensors)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content.replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))


def twice(folder: Path, tensors: Tensors) -> None:
    write(folder / WEIGHTS, tensors)
    write(folder / "other.safetensors", {"model.norm.weight": tensors["model.norm.weight"]})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder, tensors: folder.rmdir(), "the folder does not exist here"),
        (lambda folder, tensors: None, "it has no *.safetensors"),
        (lambda folder, tensors: (folder / WEIGHTS).write_text("{}"), "not a complete safetensors file"),
        (cut_short, "not a complete safetensors file"),
        (one_missing, "model.norm.weight is missing"),
        (one_more, "model.layers.2.mlp.up_proj.weight is not in the model"),
        (another_shape, "model.embed_tokens.weight has shape [272, 64], in the model [280, 64]"),
        (another_type, "has type I32, in the model F32"),
        (twice, "model.norm.weight is also in another file of the folder"),
    ],
    ids=["absent", "empty", "garbage", "cut-short", "missing", "unknown", "shape", "type", "twice"],
)
async def test_a_folder_that_does_not_fit_is_refused_before_anything_changes(
    vllm: Vllm, tmp_path: Path, make: Callable[[Path, Tensors], None], reason: str
):
    folder = tmp_path / "bad"
    folder.mkdir()
    make(folder, read(vllm.model / WEIGHTS))
    before = await vllm.generate(PROMPT, max_tokens=8, temperature=0)
    for method in ("headrace_check", "headrace_load"):
        refused = await vllm.call(method, str(folder))
        assert reason in refused["refused"]
        assert str(folder) in refused["refused"]
    assert await vllm.generate(PROMPT, max_tokens=8, temperature=0) == before
    assert await vllm.version() == "default"


async def test_a_reload_that_broke_off_can_be_ended_so_that_the_server_lives(vllm: Vllm, second: Path):
    before = await vllm.generate(PROMPT, max_tokens=8, temperature=0)
    # vLLM's own reload takes a folder at its word, and leaves layers without tensors.
    body = {"method": "reload_weights", "kwargs": {"weights_path": "/nonexistent"}}
    assert (await vllm.post("/collective_rpc", body, headers={"Connection": "close"}))[0] == 500
    await vllm.call("headrace_mend")
    assert await vllm.generate(PROMPT, max_tokens=8, temperature=0) == before
    await vllm.sync(second, "0.1")
    assert await vllm.generate(PROMPT, max_tokens=8, temperature=0) != before


async def test_files_with_another_digest_than_the_announced_one_are_refused_and_change_nothing(
    vllm: Vllm, second: Path
):
    before = await vllm.generate(PROMPT, max_tokens=8, temperature=0)
    digest = weight_digest(second, "full")
    for wrong in (f"{digest[:-1]}x", f"x{digest[1:]}"):
        for method in ("headrace_check", "headrace_load"):
            assert (await vllm.call(method, str(second), wrong))["kind"] == "weights-changed"
    assert await checked(vllm, second, digest) == {"tensors": 24, "bytes": (second / WEIGHTS).stat().st_size}
    write_model(second, seed=2, tied=True)  # overwritten between check and load
    refused = await vllm.call("headrace_load", str(second), digest)
    assert "changed after they were checked" in refused["refused"]
    assert (await vllm.generate(PROMPT, max_tokens=8, temperature=0))["token_ids"] == before["token_ids"]
    assert (await checked(vllm, second, digest))["kind"] == "weights-changed"
    assert "tensors" in await checked(vllm, second, weight_digest(second, "full"))
    assert "tensors" in await vllm.call("headrace_load", str(second), weight_digest(second, "full"))


async def checked(vllm: Vllm, folder: Path, digest: str) -> dict[str, Any]:
    """The answer of a check, once the files are hashed."""
    async with asyncio.timeout(30):
        while (answer := await vllm.call("headrace_check", str(folder), digest)) == {"pending": True}:
            pass
    return answer


async def test_an_adapter_with_another_digest_is_refused(vllm: Vllm, tmp_path: Path):
    write_adapter(tmp_path, vllm.model, seed=1)
    digest = weight_digest(tmp_path, "adapter")
    write_adapter(tmp_path, vllm.model, seed=2)
    assert (await vllm.call("headrace_check_adapter", str(tmp_path), digest))["kind"] == "weights-changed"
    assert await vllm.call("headrace_check_adapter", str(tmp_path), weight_digest(tmp_path, "adapter")) == {
        "tensors": 8
    }
