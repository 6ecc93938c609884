"""Generator of a tiny language model with random weights, a tokenizer and a chat template, in the folder layout that
vLLM, transformers and TRL read. The same seed gives the same files. Needs only numpy.

    python examples/tiny_model.py build/tiny
    python examples/tiny_model.py build/tiny-tied --tied --seed 1

* The model is a Qwen3 of two layers (about 1 MB). With --tied its input and output embeddings are one matrix.
* Token ids below 256 are bytes; then follow a few words and parts of words, then the special tokens.
* `write_adapter` makes a LoRA adapter for it; `read` and `write` convert safetensors files to and from numpy arrays.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[np.float32]]

MERGES = [
    "t h",
    "i n",
    "e r",
    "a n",
    "r e",
    "o n",
    "e s",
    "th e",
    "in g",
    "an d",
    "Ġ the",
    "Ġ a",
    "Ġ and",
    "Ġ i",
    "l l",
]
"""Merges of bytes: enough to tokenize most texts in several ways, so that re-encoded sampled ids would differ."""

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

WEIGHTS = "model.safetensors"


def config(vocabulary: int, *, tied: bool = False, hidden: int = 64, layers: int = 2) -> dict[str, Any]:
    """Make the model's config.json. vLLM's attention for CPUs needs heads of 32."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64 or 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "torch_dtype": "float32",
    }


def weights(config: dict[str, Any], seed: int = 0, spread: float = 0.15) -> Tensors:
    """Make random float32 weights with the names of transformers. With the default spread the next token's distribution
    is far from uniform; with the 0.02 of transformers it is almost uniform."""
    random = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.normal(0.0, spread, (rows, columns)).astype(np.float32)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": ones(hidden),
                "self_attn.q_proj": matrix(queries, hidden),
                "self_attn.k_proj": matrix(keys, hidden),
                "self_attn.v_proj": matrix(keys, hidden),
                "self_attn.o_proj": matrix(hidden, queries),
                "self_attn.q_norm": ones(head),
                "self_attn.k_norm": ones(head),
                "post_attention_layernorm": ones(hidden),
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }.items()
        }
    tensors["model.norm.weight"] = ones(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def vocabulary() -> dict[str, int]:
    """Return the token ids by their text in byte-level BPE, special tokens last."""
    pieces = [_letter(byte) for byte in range(256)] + [merge.replace(" ", "") for merge in MERGES] + SPECIAL
    return {piece: index for index, piece in enumerate(pieces)}


def token_id(special: str) -> int:
    return 256 + len(MERGES) + SPECIAL.index(special)


def write_model(
    folder: Path, *, seed: int = 0, tied: bool = False, hidden: int = 64, layers: int = 2, spread: float = 0.15
) -> None:
    """Write a folder with everything that a server needs to serve the model."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(len(vocabulary()), tied=tied, hidden=hidden, layers=layers)
    _write_json(folder / "config.json", settings)
    _write_tokenizer(folder, settings["max_position_embeddings"])
    write(folder / WEIGHTS, weights(settings, seed, spread))


def write_adapter(folder: Path, model: Path, *, seed: int = 0, rank: int = 4) -> None:
    """Write a LoRA adapter of the model's query and value projections, in PEFT's layout. Its effect is strong."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, tensor in read(model / WEIGHTS).items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            out, into = tensor.shape
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = random.normal(0.0, 0.3, (rank, into)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.normal(0.0, 0.3, (out, rank)).astype(np.float32)
    write(folder / "adapter_model.safetensors", tensors)
    _write_json(
        folder / "adapter_config.json",
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "bias": "none"}
        | {"r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
    )


def read(path: Path) -> Tensors:
    """Read the float32 tensors of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], "<f4").reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def write(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file atomically."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())
    os.replace(partial, path)


def _write_tokenizer(folder: Path, longest: int) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words = {piece: index for piece, index in vocabulary().items() if piece not in SPECIAL}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    bpe |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": token_id(text), "content": text, **special} for text in SPECIAL],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {**bpe, "vocab": words, "merges": MERGES},
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        | {"model_max_length": longest, "clean_up_tokenization_spaces": False},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _letter(byte: int) -> str:
    """Return the character for a byte in byte-level BPE: printable bytes themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="one matrix for input and output embeddings")
    parser.add_argument("--hidden", type=int, default=64, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    write_model(options.folder, seed=options.seed, tied=options.tied, hidden=options.hidden, layers=options.layers)
    print(f"wrote {options.folder}: {(options.folder / WEIGHTS).stat().st_size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
