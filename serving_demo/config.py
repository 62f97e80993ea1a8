"""``ModelConfig``: the shape of a Llama-family decoder, from GGUF metadata or a config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusedops.epilogue.activations import activation_from_hf
from fusedops.errors import ConfigError, LoadError
from fusedops.ops.rope_table import RopeScaling

__all__ = [
    "GGUF_ARCHITECTURES",
    "HF_MODEL_TYPES",
    "ModelConfig",
    "config_from_gguf",
    "config_from_hf",
    "each_tensor",
    "expected_tensors",
]

HF_MODEL_TYPES = ("llama", "mistral")
"""``model_type`` values of a config.json that describe this family."""

GGUF_ARCHITECTURES = ("llama",)
"""``general.architecture`` values of this family (llama.cpp files Mistral under llama, too)."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes:
        architecture: what the file calls itself ("llama", "mistral").
        hidden_size, n_layers, n_heads, n_kv_heads, head_dim, intermediate_size, vocab_size: sizes.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched for long contexts; None leaves them alone.
        rms_norm_eps: epsilon of every RMSNorm.
        tied_embeddings: the output head is the embedding matrix.
        qkv_bias, o_bias: the q, k and v projections, or the output projection, have biases.
        mlp_bias: gate, up and down projections have biases.
        activation: the gate's activation, in fusedops' names.
        sliding_window: positions a query sees, its own included; 0 for all.
        max_positions: longest sequence the model was trained for.
        eos_token_ids: tokens that end a text.
        bos_token_id: the token that opens a text, if the model has one.
    """

    architecture: str
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str
    sliding_window: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    @property
    def kv_elements_per_position(self) -> int:
        """Elements of K and V together that one cached position holds, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


class _Fields:
    """Typed look-ups in a mapping read from a file; every failure names the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def _number(self, name: str, default: float | None) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise LoadError(f"{self.where}: the field {name!r} is missing.")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise LoadError(f"{self.where}: the field {name!r} is {value!r}, not a number.")
        return value

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self._number(name, default)
        if value != int(value) or value < 1:
            raise LoadError(
                f"{self.where}: the field {name!r} is {value!r}, not a positive integer."
            )
        return int(value)

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = float(self._number(name, default))
        if not 0.0 < value < float("inf"):
            raise LoadError(
                f"{self.where}: the field {name!r} is {value!r}, not a positive number."
            )
        return value


def _refuse_architecture(where: str, got: object, accepted: Sequence[str], field: str) -> None:
    if got not in accepted:
        raise LoadError(
            f"{where}: architecture {got!r} (field {field!r}) is not supported; accepted are "
            f"{', '.join(accepted)}."
        )


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    if config.n_heads % config.n_kv_heads:
        raise LoadError(
            f"{where}: {config.n_heads} attention heads are not a multiple of "
            f"{config.n_kv_heads} key/value heads."
        )
    if config.head_dim % 2:
        raise LoadError(f"{where}: head dimension {config.head_dim} is odd; RoPE rotates pairs.")
    return config


def _token_ids(value: object, where: str, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    items = value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise LoadError(f"{where}: the field {name!r} is {value!r}, not token ids.")
    return tuple(items)


def config_from_hf(
    values: Mapping[str, Any], where: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The configuration that a Hugging Face ``config.json`` describes.

    Args:
        values: the parsed file.
        where: the file's name, for error messages.
        generation: the parsed ``generation_config.json``; its eos ids win where it has any.

    Raises:
        LoadError: another architecture, a quantised checkpoint, or a missing or impossible field.
    """
    _refuse_architecture(where, values.get("model_type"), HF_MODEL_TYPES, "model_type")
    if values.get("quantization_config"):
        raise LoadError(
            f"{where}: the checkpoint is quantised (field 'quantization_config'); the demo reads "
            "float32, bfloat16 and float16 safetensors, or a GGUF file."
        )
    fields = _Fields(values, where)
    architecture = str(values["model_type"])
    hidden = fields.positive_int("hidden_size")
    heads = fields.positive_int("num_attention_heads")
    rope = dict(values.get("rope_scaling") or {}) | dict(values.get("rope_parameters") or {})
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    max_positions = fields.positive_int("max_position_embeddings", 2048)
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise LoadError(
            f"{where}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; "
            "the Llama family rotates the whole head."
        )
    try:
        activation = activation_from_hf(str(values.get("hidden_act", "silu")))
        scaling = RopeScaling.from_hf(rope, max_positions) if rope else None
    except ConfigError as error:
        raise LoadError(f"{where}: {error}") from error
    attention_bias = architecture == "llama" and bool(values.get("attention_bias"))
    mistral = architecture == "mistral"
    # What an absent field means differs between the two: these are the families' own defaults.
    window = values.get("sliding_window", 4096) if mistral else None
    eos = (generation or {}).get("eos_token_id", values.get("eos_token_id"))
    bos = _token_ids(values.get("bos_token_id"), where, "bos_token_id")
    return _checked(
        ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            n_layers=fields.positive_int("num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=fields.positive_int("num_key_value_heads", 8 if mistral else heads),
            head_dim=fields.positive_int("head_dim", hidden // heads),
            intermediate_size=fields.positive_int("intermediate_size"),
            vocab_size=fields.positive_int("vocab_size"),
            rope_theta=_Fields({"rope_theta": theta}, where).positive_float("rope_theta"),
            rope_scaling=scaling,
            rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "llama" and bool(values.get("mlp_bias")),
            activation=activation,
            sliding_window=int(window or 0),
            max_positions=max_positions,
            eos_token_ids=_token_ids(eos, where, "eos_token_id"),
            bos_token_id=bos[0] if bos else None,
        ),
        where,
    )


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], where: str
) -> ModelConfig:
    """The configuration that a GGUF file's metadata and tensor list describe.

    Args:
        metadata: key -> value, as ``serving_demo.gguf_loader.read_header`` returns them.
        tensors: tensor name -> shape (rows first, as torch has it); biases and an output head of
            its own show in the list only.
        where: the file's name, for error messages.

    Raises:
        LoadError: another architecture, a mixture of experts, or a missing or impossible field.
    """
    architecture = metadata.get("general.architecture")
    _refuse_architecture(where, architecture, GGUF_ARCHITECTURES, "general.architecture")
    prefix = f"{architecture}."
    fields = _Fields(metadata, where)
    if metadata.get(f"{prefix}expert_count"):
        raise LoadError(
            f"{where}: the model is a mixture of {metadata[f'{prefix}expert_count']} experts; "
            "accepted are dense models of the Llama family."
        )
    hidden = fields.positive_int(f"{prefix}embedding_length")
    heads = fields.positive_int(f"{prefix}attention.head_count")
    head_dim = fields.positive_int(f"{prefix}attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        size = fields.positive_int(prefix + name, head_dim)
        if size != head_dim:
            raise LoadError(
                f"{where}: the field {prefix + name!r} is {size}, but the head dimension is "
                f"{head_dim}; the demo supports equal ones only."
            )
    max_positions = fields.positive_int(f"{prefix}context_length")
    embedding = tensors.get("token_embd.weight")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return _checked(
        ModelConfig(
            architecture=str(architecture),
            hidden_size=hidden,
            n_layers=fields.positive_int(f"{prefix}block_count"),
            n_heads=heads,
            n_kv_heads=fields.positive_int(f"{prefix}attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=fields.positive_int(f"{prefix}feed_forward_length"),
            vocab_size=fields.positive_int(
                f"{prefix}vocab_size", embedding[0] if embedding else None
            ),
            rope_theta=fields.positive_float(f"{prefix}rope.freq_base", 10000.0),
            rope_scaling=_gguf_rope_scaling(fields, prefix, max_positions),
            rms_norm_eps=fields.positive_float(f"{prefix}attention.layer_norm_rms_epsilon"),
            tied_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            activation="silu",
            sliding_window=0,
            max_positions=max_positions,
            eos_token_ids=tuple(dict.fromkeys(t for t in eos if isinstance(t, int))),
            bos_token_id=bos if isinstance(bos, int) else None,
        ),
        where,
    )


def _gguf_rope_scaling(fields: _Fields, prefix: str, max_positions: int) -> RopeScaling | None:
    kind = fields.get(f"{prefix}rope.scaling.type")
    if kind in (None, "none"):
        return None
    values: dict[str, Any] = {
        "rope_type": kind,
        "factor": fields.positive_float(f"{prefix}rope.scaling.factor"),
    }
    if kind == "yarn":
        values["original_max_position_embeddings"] = fields.positive_int(
            f"{prefix}rope.scaling.original_context_length"
        )
    try:
        return RopeScaling.from_hf(values, max_positions)
    except ConfigError as error:
        raise LoadError(f"{fields.where}: {error}") from error


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of such a model, under Hugging Face's names."""
    return dict(each_tensor(config))


def each_tensor(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of such a model, under Hugging Face's names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows, columns, bias in linears:
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
