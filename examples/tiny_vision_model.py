"""Generator of a tiny model with image input: a LLaVA with random weights around the language model of tiny_model.py.
The same seed gives the same files. Needs only numpy.

    python -m examples.tiny_vision_model build/tiny-vision

* An image is scaled to 32 × 32 pixels and cut into patches of 4 × 4: in a prompt it has 64 tokens, all `IMAGE`.
* The output depends on the content of the image.
* vLLM serves it on CPUs, and needs torchvision for it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from examples.tiny_model import WEIGHTS, Tensors, read, token_id, vocabulary, write, write_model

IMAGE = len(vocabulary())
"""Id of the image token, the last one of the vocabulary."""

IMAGE_TEXT = "<image>"
PIXELS, PATCH, WIDTH, INNER, LAYERS = 32, 4, 32, 64, 2
IMAGE_TOKENS = (PIXELS // PATCH) ** 2

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_vision_model(folder: Path, *, seed: int = 0) -> None:
    """Write a folder with everything that a server needs to serve the model."""
    write_model(folder, seed=seed)
    language = json.loads((folder / "config.json").read_text())
    _change(folder / "config.json", **_config(language))
    _add_image_token(folder / "tokenizer.json")
    _change(folder / "tokenizer_config.json", processor_class="LlavaProcessor", extra_special_tokens=[IMAGE_TEXT])
    _change(folder / "processor_config.json", **_processor())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    random = np.random.default_rng([seed, IMAGE])
    write(folder / WEIGHTS, _language(read(folder / WEIGHTS), random) | _vision(language["hidden_size"], random))


def _config(language: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float32",
        "image_token_index": IMAGE,
        "image_seq_length": IMAGE_TOKENS,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",  # all tokens except the first, which does not represent a patch
        "eos_token_id": token_id("<|im_end|>"),
        "text_config": language | {"vocab_size": IMAGE + 1},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 1,
            "image_size": PIXELS,
            "patch_size": PATCH,
            "projection_dim": WIDTH,
        },
    }


def _processor() -> dict[str, Any]:
    """Make the processor_config.json of transformers, which converts images to pixels and image tokens."""
    size = {"height": PIXELS, "width": PIXELS}
    return {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TEXT,
        "num_additional_image_tokens": 1,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "image_processor": {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": PIXELS},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": size,
            "do_convert_rgb": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.25] * 3,
        },
    }


def _language(tensors: Tensors, random: np.random.Generator) -> Tensors:
    """Rename the language model's tensors, and add a row for the image token to those with a row per token."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        row = random.normal(0.0, 0.15, (1, tensors[name].shape[1])).astype(np.float32)
        tensors[name] = np.concatenate([tensors[name], row])
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def _vision(hidden: int, random: np.random.Generator) -> Tensors:
    """Make the tensors of CLIP's vision transformer and of the projector to the language model's width."""

    def matrix(*shape: int) -> Any:
        return random.normal(0.0, 0.15, shape).astype(np.float32)

    def linear(name: str, out: int, into: int) -> Tensors:
        return {f"{name}.weight": matrix(out, into), f"{name}.bias": np.zeros(out, np.float32)}

    def norm(name: str) -> Tensors:
        return {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}

    tower = "vision_tower.vision_model"
    tensors = {
        f"{tower}.embeddings.class_embedding": matrix(WIDTH),
        f"{tower}.embeddings.patch_embedding.weight": matrix(WIDTH, 3, PATCH, PATCH),
        f"{tower}.embeddings.position_embedding.weight": matrix(IMAGE_TOKENS + 1, WIDTH),
    }
    tensors |= norm(f"{tower}.pre_layrnorm") | norm(f"{tower}.post_layernorm")  # CLIP's spelling
    for number in range(LAYERS):
        layer = f"{tower}.encoder.layers.{number}"
        tensors |= norm(f"{layer}.layer_norm1") | norm(f"{layer}.layer_norm2")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= linear(f"{layer}.self_attn.{name}", WIDTH, WIDTH)
        tensors |= linear(f"{layer}.mlp.fc1", INNER, WIDTH) | linear(f"{layer}.mlp.fc2", WIDTH, INNER)
    projector = "multi_modal_projector"
    return tensors | linear(f"{projector}.linear_1", hidden, WIDTH) | linear(f"{projector}.linear_2", hidden, hidden)


def _add_image_token(path: Path) -> None:
    added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
    _change(path, added_tokens=[*added, added[-1] | {"id": IMAGE, "content": IMAGE_TEXT}])


def _change(path: Path, **fields: Any) -> None:
    """Set fields of the JSON object in a file, which is made if missing."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(value | fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model with image input and random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_vision_model(options.folder, seed=options.seed)
    print(f"wrote {options.folder}: {(options.folder / WEIGHTS).stat().st_size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
