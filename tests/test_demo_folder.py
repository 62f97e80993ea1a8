"""Reading Hugging Face folders: single and sharded files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_demo_models import save, transformers_model

from fusedops.errors import LoadError
from serving_demo.config import config_from_hf, expected_tensors
from serving_demo.loader import load_checkpoint


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_model("llama", attention_bias=True)


@pytest.fixture
def folder(reference: Any, tmp_path: Path) -> Path:
    return save(reference, tmp_path)


def refused(folder: Path, *words: str) -> None:
    """Loading the folder fails with one line that holds the words."""
    with pytest.raises(LoadError) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    for word in (str(folder), *words):
        assert word in str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    """Rewrite fields of config.json; None removes one."""
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_single_file(reference: Any, folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    assert set(checkpoint.tensors) == set(reference.state_dict())
    for name, tensor in reference.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], tensor)
    assert checkpoint.weight_format == "safetensors, F32"
    assert checkpoint.hf_config is not None


def test_a_sharded_folder_in_bfloat16(reference: Any, tmp_path: Path) -> None:
    half = transformers_model("llama", attention_bias=True).bfloat16()
    save(half, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    checkpoint = load_checkpoint(tmp_path, torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], tensor.bfloat16().float())
    assert checkpoint.weight_format == "safetensors, BF16"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(transformers_model("llama"), tmp_path, max_shard_size="20KB")
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    refused(tmp_path, f"{victim} is missing", "model.safetensors.index.json names it")


def test_an_index_may_not_name_a_file_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "'../outside.safetensors'", "no plain file")


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "lacks model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_empty_index(index: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "'weight_map' is missing or empty")


@pytest.mark.parametrize("kept", [0.001, 0.5, 0.999])
def test_a_truncated_file(kept: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    refused(folder, "model.safetensors is damaged or truncated", "Fetch the file again")


def test_an_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, "is empty", "accepted with --model are a GGUF file", "tokenizer.json")


def test_everything_that_a_folder_lacks_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    refused(tmp_path, "lacks config.json, tokenizer.json, model.safetensors (or")


@pytest.mark.parametrize(
    ("other", "hint"),
    [("model.Q4_1.gguf", "--model {}/model.Q4_1.gguf"), ("pytorch_model.bin", "is not read")],
)
def test_a_folder_of_another_format_says_what_to_do(other: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / other).write_bytes(b"content")
    refused(tmp_path, "lacks config.json", hint.format(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_a_file_that_only_stands_for_its_content(content: bytes, words: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", words)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_or_damaged_json_file(name: str, folder: Path) -> None:
    (folder / name).write_text("{")
    refused(folder, name, "damaged")
    (folder / name).unlink()
    refused(folder, name)


def test_a_config_that_holds_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json holds no JSON object")


def test_a_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, "'model.layers.1.mlp.up_proj.weight' is missing")


def test_a_tensor_of_another_shape(folder: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(17)

    change_tensors(folder, widen)
    refused(folder, "'model.layers.0.self_attn.k_proj.bias'", "(17,)", "(16,)")


def test_b84_a_bias_that_the_config_does_not_announce_is_not_dropped(folder: Path) -> None:
    change_config(folder, attention_bias=False)
    refused(folder, "k_proj.bias' is no part of a llama model", "nor are 7 others")


def test_a_tensor_of_another_dtype(folder: Path) -> None:
    def whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    change_tensors(folder, whole_numbers)
    refused(folder, "'model.norm.weight' is stored as I8", "F32, BF16, F16")


def test_b86_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    save(transformers_model("llama", tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    before = load_checkpoint(tmp_path)

    def store_both(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    change_tensors(tmp_path, store_both)
    after = load_checkpoint(tmp_path)
    assert set(after.tensors) == set(before.tensors)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, ("'qwen2'", "accepted are llama, mistral")),
        ({"quantization_config": {"bits": 4}}, ("quantised", "GGUF")),
        ({"hidden_act": "mish"}, ("'mish'", "silu")),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, ("5 attention heads", "2")),
        ({"num_key_value_heads": 0}, ("'num_key_value_heads' is 0",)),
        ({"hidden_size": "wide"}, ("'hidden_size' is 'wide'",)),
        ({"hidden_size": True}, ("'hidden_size' is True",)),
        ({"hidden_size": None}, ("'hidden_size' is missing",)),
        ({"head_dim": 7}, ("7 is odd",)),
        ({"eos_token_id": "end"}, ("'eos_token_id' is 'end'",)),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", "yarn")),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ("partial_rotary_factor 0.5",),
        ),
    ],
)
def test_configs_that_the_demo_cannot_serve(
    changes: dict[str, Any], words: tuple[str, ...], folder: Path
) -> None:
    change_config(folder, generation_config=None, **changes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    refused(folder, "config.json", *words)


BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
}


def test_absent_fields_mean_what_the_family_says() -> None:
    llama = config_from_hf(BASE, "config.json")
    assert (llama.n_kv_heads, llama.head_dim, llama.max_positions) == (4, 16, 2048)
    assert (llama.rope_theta, llama.rms_norm_eps, llama.activation) == (10000.0, 1e-6, "silu")
    assert (llama.tied_embeddings, llama.sliding_window, llama.eos_token_ids) == (False, 0, ())
    mistral = config_from_hf({**BASE, "model_type": "mistral", "num_attention_heads": 8}, "c")
    assert (mistral.n_kv_heads, mistral.sliding_window) == (8, 4096)


def test_old_and_new_names_of_the_rope_fields() -> None:
    old = config_from_hf(
        {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "c"
    )
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    new = config_from_hf({**BASE, "rope_parameters": rope}, "c")
    assert old == new
    assert new.rope_theta == 5e5


def test_end_of_text_tokens_come_from_the_generation_config_first() -> None:
    values = {**BASE, "eos_token_id": 2}
    assert config_from_hf(values, "c").eos_token_ids == (2,)
    assert config_from_hf(values, "c", {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert config_from_hf(values, "c", {"do_sample": True}).eos_token_ids == (2,)


def test_expected_tensors_are_those_of_transformers(reference: Any, folder: Path) -> None:
    config = load_checkpoint(folder).config
    state = reference.state_dict()
    assert expected_tensors(config) == {name: tuple(t.shape) for name, t in state.items()}
