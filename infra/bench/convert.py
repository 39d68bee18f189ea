"""The demo model as the directory that peers load: safetensors, config.json, tokenizer files.

    python infra/bench/convert.py --model smollm2 --dtype bfloat16 --folder out/bench/models/bfloat16

Reads a GGUF file of the Llama family with the engine's own reader, so that every engine compared computes
with the same numbers; a cast to bfloat16 happens once, here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.engine.models.spec import DecoderSpec


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Writes `folder`; raises ModelLoadError for a file that can't be read or is of another family."""
    import torch
    from safetensors.torch import save_file

    from pagemill.engine.errors import ModelLoadError
    from pagemill.engine.models.spec import DecoderSpec
    from pagemill.engine.weights.load import open_checkpoint

    checkpoint = open_checkpoint(source)
    spec = checkpoint.spec
    if not isinstance(spec, DecoderSpec) or spec.architecture != "LlamaForCausalLM":
        raise ModelLoadError(f"{source} is {spec.architecture}; only LlamaForCausalLM is converted.")
    folder.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, dtype)
    weights = {
        name: checkpoint.restore(name, checkpoint.files.read(checkpoint.name_of(name))).to(kind).contiguous()
        for name in _names(spec)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(spec, dtype)
    config |= {f"{role}_token_id": index for role, index in _roles(source).items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _save_tokenizer(source, folder, spec.context)


def _names(spec: DecoderSpec) -> list[str]:
    """transformers' names of a Llama's weights."""
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = [f"model.layers.{i}.{part}.weight" for i in range(spec.num_layers) for part in parts]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    return names if spec.tied else [*names, "lm_head.weight"]


def _config(spec: DecoderSpec, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        # GGUF keeps it in single precision, where 1e-5 is not quite that.
        "rms_norm_eps": float(f"{spec.norm_eps:.6g}"),
        "rope_theta": spec.rope.theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "tie_word_embeddings": spec.tied,
    }


def _roles(source: Path) -> dict[str, int]:
    from pagemill.engine.weights.gguf import GGUFFile
    from pagemill.engine.weights.gguf_tokenizer import token_of

    metadata = GGUFFile(source).metadata
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {role: token_of(metadata, name) for role, name in names.items()}
    return {role: index for role, index in found.items() if index is not None}


def _save_tokenizer(source: Path, folder: Path, context: int) -> None:
    """With the pre-tokenizer that the file names, which transformers' own GGUF reader passes over."""
    from transformers import PreTrainedTokenizerFast

    from pagemill.engine.weights.gguf import GGUFFile
    from pagemill.engine.weights.gguf_tokenizer import build_tokenizer

    metadata = GGUFFile(source).metadata
    backend = build_tokenizer(metadata)
    special = {f"{role}_token": backend.id_to_token(index) for role, index in _roles(source).items()}
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **special,
    ).save_pretrained(folder)
    # transformers 5 writes a class that releases before it do not know; this one they all have.
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def main() -> None:
    from pagemill.worker.models import resolve_model

    parser = argparse.ArgumentParser(description="Write the demo model as a Hugging Face directory.")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a .gguf file of the Llama family")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    convert(resolve_model(options.model), options.folder, options.dtype)


if __name__ == "__main__":
    main()
