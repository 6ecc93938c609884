"""The tiny models of examples, tests and benchmarks: the same each time, and tokenized in a way that shows mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.tiny_model import SPECIAL, WEIGHTS, read, token_id, write, write_adapter, write_model
from examples.tiny_vision_model import IMAGE, write_vision_model
from headrace.runspec import PolicySpec
from headrace.trajectory import ContentPart, Message
from headrace_workers.renderers import make_renderer


def test_the_same_seed_makes_the_same_files_and_another_one_others(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_model(tmp_path / name, seed=seed)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "abc"]
    assert files[0] == files[1]
    assert files[0][WEIGHTS] != files[2][WEIGHTS]
    assert sum(map(len, files[0].values())) < 2e6


def test_tied_embeddings_are_stored_once(tmp_path: Path):
    write_model(tmp_path, tied=True)
    assert "lm_head.weight" not in read(tmp_path / WEIGHTS)


def test_a_file_of_weights_reads_as_it_was_written(tmp_path: Path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(1, np.float32)}
    write(tmp_path / WEIGHTS, tensors)
    found = read(tmp_path / WEIGHTS)
    assert list(found) == ["a", "b"]
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert [file.name for file in tmp_path.iterdir()] == [WEIGHTS]


def test_ids_below_256_are_bytes_and_text_survives_encoding_and_decoding(tmp_path: Path):
    write_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the end: é 日本 \n\t <|im_start|>user"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert token_id("<|im_start|>") in ids
    assert tokenizer.get_vocab_size() == token_id(SPECIAL[-1]) + 1
    assert tokenizer.decode([*b"the"]) == "the"
    assert tokenizer.encode("the").ids != [*b"the"]  # so that what was sampled, encoded again, is something else


def test_an_adapter_fits_its_model(tmp_path: Path):
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model", rank=4)
    model, adapter = read(tmp_path / "model" / WEIGHTS), read(tmp_path / "adapter" / "adapter_model.safetensors")
    stem = "layers.1.self_attn.q_proj"
    down, up = (adapter[f"base_model.model.model.{stem}.lora_{side}.weight"] for side in "AB")
    assert (up @ down).shape == model[f"model.{stem}.weight"].shape
    assert down.shape[0] == up.shape[1] == 4


def test_a_vision_model_is_reproducible_and_its_template_renders_an_image_as_one_token(tmp_path: Path):
    for name in "ab":
        write_vision_model(tmp_path / name)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    renderer = make_renderer(PolicySpec(renderer="template", tokenizer=str(tmp_path / "a")))
    parts = [ContentPart(type="text", text="Look:"), ContentPart(type="image", asset="an image")]
    prompt = renderer.start([Message(role="user", content=parts)])
    assert renderer.image_token_id == IMAGE == renderer.tokenizer.vocab_size - 1
    assert prompt.new_ids.count(IMAGE) == len(prompt.images) == 1
