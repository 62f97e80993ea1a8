"""Reading GGUF files: a tiny file written here, its damaged copies, and what is refused."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_demo_models import SIZES, ScatteredRequests, byte_tokenizer, transformers_model

from fusedops.errors import LoadError
from serving_demo.gguf_header import read_header
from serving_demo.loader import load_checkpoint
from serving_demo.model import DecoderModel

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Every row must hold whole blocks of 32 elements, quantised or not.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    prefix, part = (f"blk.{match[1]}.", match[2]) if match else ("", stem)
    return f"{prefix}{GGUF_NAMES[part]}.{kind}"


def neighbours_order(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp stores them: rotation partners side by side."""
    head_dim = rows.shape[0] // n_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(n_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    model: Any,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a transformers Llama as llama.cpp's converter lays it out.

    ``kinds``: part of a tensor's name -> how it is quantised (default: float32).
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocabulary = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    # A merge must lead to a token, so one of the printable characters gives way to "he".
    writer.add_token_list(["he" if token == "|" else token for token, _ in vocabulary])
    writer.add_token_types([3, 3, 3] + [1] * 93)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if metadata is not None:
        metadata(writer)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, values in state.items():
        stored = gguf_name(name)
        if stored in leave_out:
            continue
        if "q_proj" in name:
            values = neighbours_order(values, config.num_attention_heads)
        elif "k_proj" in name:
            values = neighbours_order(values, config.num_key_value_heads)
        kind = next((k for part, k in (kinds or {}).items() if part in stored), None)
        if kind is None:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_model("llama", **WIDE, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def plain_file(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "plain.gguf", reference)


def test_float32_tensors_come_back_bitwise(reference: Any, plain_file: Path) -> None:
    checkpoint = load_checkpoint(plain_file)
    state = reference.state_dict()
    assert set(checkpoint.tensors) == set(state) - {"lm_head.weight"}
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name
    assert checkpoint.weight_format == "GGUF, F32"
    assert checkpoint.config.tied_embeddings
    assert checkpoint.config.eos_token_ids == (2,)


def test_biases_and_an_output_head_of_its_own(tmp_path: Path) -> None:
    model = transformers_model("llama", **WIDE, attention_bias=True, mlp_bias=True)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "biases.gguf", model))
    config = checkpoint.config
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert not config.tied_embeddings
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], tensor), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_stored_formats_dequantise_to_their_own_grid(
    kind: str, reference: Any, tmp_path: Path
) -> None:
    quantised = {
        "attn_q.": gguf.GGMLQuantizationType[kind],
        "ffn_down": gguf.GGMLQuantizationType[kind],
    }
    checkpoint = load_checkpoint(write_gguf(tmp_path / "q.gguf", reference, quantised))
    # Steps of a block of 32 normal values of about 1/8: at most 2 * 0.5 / 15, halved by rounding.
    bound = {"F16": 3e-4, "BF16": 3e-3, "Q8_0": 3e-3, "Q5_1": 0.02}.get(kind, 0.05)
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        error = (checkpoint.tensors[name] - reference.state_dict()[name]).abs().max()
        assert 0 < error < bound
    untouched = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(checkpoint.tensors[untouched], reference.state_dict()[untouched])
    assert checkpoint.weight_format == f"GGUF, {', '.join(sorted((kind, 'F32')))}"


def test_tensors_are_cast_to_the_dtype_asked_for(reference: Any, plain_file: Path) -> None:
    checkpoint = load_checkpoint(plain_file, torch.bfloat16)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, reference.state_dict()[name].bfloat16())


def test_logits_of_a_gguf_file_equal_transformers(reference: Any, plain_file: Path) -> None:
    model = DecoderModel.from_checkpoint(load_checkpoint(plain_file))
    prompt = list(range(3, 24))
    logits = ScatteredRequests(model, [prompt], 24).feed([prompt])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["factors", "linear", "yarn"])
def test_rope_scaling_of_a_gguf_file(form: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0}
    extra: dict[str, np.ndarray] = {}
    if form == "factors":
        rope |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    else:
        rope["rope_type"] = form
        if form == "yarn":
            rope["original_max_position_embeddings"] = 32
    model = transformers_model("llama", **WIDE, rope_parameters=rope)
    if form == "factors":
        plain = 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
        factors = (plain / model.model.rotary_emb.inv_freq.double()).float()
        extra = {"rope_freqs.weight": factors.numpy()}

    def scaling(writer: gguf.GGUFWriter) -> None:
        if form != "factors":
            writer.add_rope_scaling_type(gguf.RopeScalingType(form))
            writer.add_rope_scaling_factor(4.0)
        if form == "yarn":
            writer.add_rope_scaling_orig_ctx_len(32)

    path = write_gguf(tmp_path / "rope.gguf", model, metadata=scaling, extra=extra)
    ours = DecoderModel.from_checkpoint(load_checkpoint(path))
    prompt = list(range(3, 63))
    logits = ScatteredRequests(ours, [prompt], 64).feed([prompt])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)


# Damage


def refused(path: Path, *words: str) -> str:
    """The one line with which loading ``path`` is refused; it names the file and the words."""
    with pytest.raises(LoadError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "no file or folder")


@pytest.mark.parametrize("content", [b"GG", b"GGML" + bytes(64), b"PK\x03\x04" + bytes(64)])
def test_a_file_that_is_no_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    refused(path, "no GGUF file", repr(content[:4]), "Accepted with --model are")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty (0 bytes)"), (b"version https://git-lfs.github.com/spec/v1", "Git LFS")],
)
def test_a_file_that_only_stands_for_its_content(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(path, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("meta-llama/Llama-3-8B", "Hugging Face Hub are not looked up, as nothing is downloaded"),
        ("llama3-8b", "measure it with --shape llama3-8b"),
        ("/dev/null", "no plain file"),
        ("some/model.gguf", "no file or folder"),
    ],
)
def test_a_name_that_is_no_model_here_says_what_is_accepted(name: str, words: str) -> None:
    refused(Path(name), words, "accepted with --model are a GGUF file, and a folder")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_another_version(version: int, plain_file: Path, tmp_path: Path) -> None:
    content = plain_file.read_bytes()
    path = tmp_path / "version.gguf"
    path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    refused(path, f"version {version}", "accepted are 2 and 3")


def test_every_truncation_of_the_header_is_noticed(plain_file: Path, tmp_path: Path) -> None:
    content = plain_file.read_bytes()
    header_end = read_header(plain_file).tensors["token_embd.weight"].start
    path = tmp_path / "short.gguf"
    for size in range(4, header_end, 41):
        path.write_bytes(content[:size])
        with pytest.raises(LoadError, match=r"is truncated or damaged: .*Fetch the file again\."):
            read_header(path)


def test_truncated_data_names_the_tensor(plain_file: Path, tmp_path: Path) -> None:
    content = plain_file.read_bytes()
    tensors = sorted(read_header(plain_file).tensors.values(), key=lambda tensor: tensor.start)
    path = tmp_path / "short.gguf"
    for tensor in (tensors[0], tensors[7], tensors[-1]):
        path.write_bytes(content[: tensor.stop - 1])
        refused(path, "is truncated", repr(tensor.name), f"{tensor.stop:,}", f"{tensor.stop - 1:,}")


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_refused_or_read_but_never_crashes(
    plain_file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(plain_file.read_bytes())
    end = read_header(plain_file).tensors["token_embd.weight"].start
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    message = ""
    try:
        load_checkpoint(path)
    except LoadError as error:
        message = str(error)
    assert not message or str(path) in message


def test_a_huge_count_is_refused_before_anything_is_allocated(
    plain_file: Path, tmp_path: Path
) -> None:
    content = plain_file.read_bytes()
    key = b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8)
    at = content.index(key) + len(key)
    path = tmp_path / "huge.gguf"
    path.write_bytes(content[:at] + struct.pack("<Q", 1 << 60) + content[at + 8 :])
    refused(path, "truncated or damaged", "tokenizer.ggml.tokens")


# What the family does not cover


def test_another_architecture(reference: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", reference, architecture="mamba")
    refused(path, "'mamba'", "accepted are llama")


def test_a_missing_tensor(reference: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference, leave_out=("blk.1.ffn_up.weight",))
    refused(path, "'blk.1.ffn_up.weight' is missing")


def test_a_tensor_of_another_shape(reference: Any, tmp_path: Path) -> None:
    name = "blk.0.attn_norm.weight"
    short = {name: np.ones(32, np.float32)}
    path = write_gguf(tmp_path / "s.gguf", reference, leave_out=(name,), extra=short)
    refused(path, repr(name), "(32,)", "(64,)")


def test_a_tensor_that_no_such_model_has(reference: Any, tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", reference, extra=extra)
    refused(path, "'blk.0.attn_q_norm.weight' is no part of a llama model")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.add_expert_count(8), ("mixture of 8 experts",)),
        (lambda w: w.add_key_length(24), ("rope.dimension_count", "16", "24")),
        (lambda w: w.add_uint32("llama.vocab_size", 95), ("token_embd.weight", "(96, 64)")),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), ("scaling.factor",)),
        (lambda w: w.add_string("tokenizer.ggml.model", "llama"), ("'llama'", "'gpt2'")),
        (lambda w: w.add_string("tokenizer.ggml.pre", "tekken"), ("'tekken'", "smollm")),
        (lambda w: w.add_uint32("llama.attention.head_count_kv", 3), ("4", "3 key/value")),
        (
            lambda w: w.add_string("llama.context_length", "long"),
            ("'llama.context_length'", "'long'"),
        ),
        (lambda w: w.add_uint32("llama.block_count", 0), ("'llama.block_count'", "positive")),
        (lambda w: w.add_float32("llama.rope.freq_base", float("nan")), ("freq_base", "nan")),
    ],
)
def test_metadata_that_the_demo_cannot_serve(
    change: Callable[[gguf.GGUFWriter], None],
    words: tuple[str, ...],
    reference: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The writer refuses a key that is set twice; here the second value is to win.
    def overwrite(self: gguf.GGUFWriter, key: str, value: Any, kind: Any, sub: Any = None) -> None:
        self.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=kind, sub_type=sub)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", overwrite)
    refused(write_gguf(tmp_path / "odd.gguf", reference, metadata=change), *words)


def test_a_missing_field_is_named(reference: Any, tmp_path: Path) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.embedding_length"]

    path = write_gguf(tmp_path / "field.gguf", reference, metadata=without)
    refused(path, "'llama.embedding_length' is missing")


def test_the_vocabulary_size_of_a_file_may_be_implied(plain_file: Path) -> None:
    assert "llama.vocab_size" not in read_header(plain_file).metadata
    assert load_checkpoint(plain_file).config.vocab_size == SIZES["vocab_size"]


def test_a_huge_layer_count_ends_at_the_first_tensor_that_is_not_there(
    plain_file: Path, tmp_path: Path
) -> None:
    content = plain_file.read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    at = content.index(key) + len(key)
    path = tmp_path / "deep.gguf"
    path.write_bytes(content[:at] + struct.pack("<I", 4_000_000_000) + content[at + 4 :])
    refused(path, "'blk.2.attn_norm.weight' is missing")
