"""Every tensor accounted for, and one clear sentence for every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import (
    Driver,
    greedy,
    open_runner,
    prompts,
    reference_greedy,
    save,
    sequence,
    tiny_llama,
)
from transformers import LlamaForCausalLM

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.weights.load import load_decoder, open_checkpoint, weights_digest

CPU = torch.device("cpu")


def load(path: Path) -> None:
    load_decoder(open_checkpoint(path), torch.float32, CPU)


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; `__` in names stands for a dot."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)


def produces(path: Path, model: LlamaForCausalLM) -> bool:
    some = prompts(2, longest=20)
    tokens = Driver(open_runner(path)).finish([sequence(ids, greedy(8)) for ids in some])
    return tokens == [reference_greedy(model, ids, 8) for ids in some]


# Where weights may lie


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = tiny_llama()
    save(model, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert produces(tmp_path, model)


def test_sixteen_bit_weights_are_widened(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    save(model, tmp_path)
    assert produces(tmp_path, model.float())


# Tied embeddings (a checkpoint with or without its head)


def test_a_tied_checkpoint_loads_with_and_without_its_head(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    save(model, tmp_path)
    change_tensors(tmp_path, lm_head__weight=None)
    assert produces(tmp_path, model)
    change_tensors(tmp_path, lm_head__weight=model.model.embed_tokens.weight.detach().clone())
    assert produces(tmp_path, model)


def test_a_tied_checkpoint_whose_head_differs_uses_its_head(tmp_path: Path) -> None:
    save(tiny_llama(tie_word_embeddings=True), tmp_path)
    change_tensors(tmp_path, lm_head__weight=torch.randn(211, 64))
    assert produces(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path).eval())


def test_a_tied_checkpoint_with_the_head_alone_loads(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    save(model, tmp_path)
    embedding = model.model.embed_tokens.weight.detach().clone()
    change_tensors(tmp_path, model__embed_tokens__weight=None, lm_head__weight=embedding)
    assert produces(tmp_path, model)


def test_an_untied_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, lm_head__weight=None)
    with pytest.raises(ModelLoadError, match=r"lacks the tensor lm_head\.weight"):
        load(tmp_path)


# Accounting


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelLoadError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, model__norm__weight=torch.ones(63))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[63\], not \[64\]"):
        load(tmp_path)


def test_a_tensor_without_a_use_is_named(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
    with pytest.raises(ModelLoadError, match=r"no use for, first model\.layers\.0\.self_attn\.q_norm"):
        load(tmp_path)


def test_a_bias_that_the_config_does_not_announce_is_refused(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias"):
        load(tmp_path)


def test_what_older_converters_left_behind_is_ignored(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(tmp_path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    change_tensors(tmp_path, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelLoadError, match=r"holds torch\.int8"):
        load(tmp_path)


# Damage


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="There is no model at"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures": ["LlamaForCausalLM"]} x', "\xff"])
def test_a_broken_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickled weights are not read"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_safetensors_file_is_refused(keep: int, tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="damaged or not a safetensors file"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path, max_shard_size="50KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelLoadError, match=f"lacks 1 of .* shards, first {gone.name}"):
        load(tmp_path)


def test_an_index_does_not_lead_out_of_the_directory(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="not a plain file name"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_refused(index: str, tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match="has no weight_map"):
        load(tmp_path)


# GGUF


@pytest.mark.parametrize("keep", [0, 3, 4, 10, 40, 700, 5000])
def test_a_truncated_gguf_file_is_refused(keep: int, tmp_path: Path) -> None:
    file = write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is (empty|not a GGUF|damaged or cut short)"):
        load(file)


def test_any_byte_of_a_gguf_header_may_be_wrong(tmp_path: Path) -> None:
    good = bytearray(write_gguf(tiny_llama(), tmp_path / "tiny.gguf").read_bytes())
    file = tmp_path / "bad.gguf"
    refused = 0
    for position in range(0, 1500, 13):
        bad = bytearray(good)
        bad[position] ^= 0xFF
        file.write_bytes(bad)
        try:
            load(file)
        except ModelLoadError:
            refused += 1
    assert refused > 50


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        load(file)


def test_a_missing_gguf_tensor_is_named_as_in_the_file(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True)
    state = model.state_dict
    model.state_dict = lambda: {  # type: ignore[method-assign]
        name: weight for name, weight in state().items() if name != "model.layers.1.self_attn.k_proj.bias"
    }
    file = write_gguf(model, tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"lacks the tensor blk\.1\.attn_k\.bias"):
        load(file)


def test_a_gguf_with_attention_bias_equals_transformers(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True)
    assert produces(write_gguf(model, tmp_path / "tiny.gguf"), model)


KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_tensors_are_what_the_package_makes_of_them(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    model = tiny_llama()
    file = write_gguf(model, tmp_path / "tiny.gguf", number)
    files = open_checkpoint(file).files
    weight = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, number), number))
    assert torch.equal(files.read("blk.0.ffn_down.weight"), expected)
    assert len(Driver(open_runner(file)).finish([sequence([1, 2, 3], greedy(4))])[0]) == 4


def test_a_kind_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    file = write_gguf(tiny_llama(), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    files = open_checkpoint(file).files
    tensor = files._tensors["blk.0.ffn_down.weight"]  # type: ignore[attr-defined]
    object.__setattr__(tensor, "kind", gguf.GGMLQuantizationType.Q8_1)
    with pytest.raises(ModelLoadError, match=r"ffn_down\.weight is Q8_1, which cannot be dequantised"):
        files.read("blk.0.ffn_down.weight")


# The digest


def test_the_digest_tells_files_apart(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = bytearray(6 << 20)
    file.write_bytes(content)
    first = weights_digest([file])
    assert weights_digest([file]) == first
    for change in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[change] = 1
        file.write_bytes(changed)
        assert weights_digest([file]) != first
    file.write_bytes(content + b"\0")
    assert weights_digest([file]) != first
