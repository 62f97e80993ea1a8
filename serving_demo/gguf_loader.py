"""Read a GGUF file: dequantise its tensors and give them Hugging Face's names and row order."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fusedops.errors import LoadError
from serving_demo.checkpoint import Checkpoint, Track, check_shapes, no_progress
from serving_demo.config import ModelConfig, config_from_gguf
from serving_demo.gguf_header import GgufHeader, GgufTensor, read_header
from serving_demo.tokenizer import tokenizer_from_gguf

__all__ = ["load_gguf"]

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


_GGUF_STEMS = {hf: own for own, hf in (*_TOP_LEVEL.items(), *_IN_LAYER.items())}


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name outside the family is returned as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and layer.isdecimal() and part in _IN_LAYER:
        return f"model.layers.{int(layer)}.{_IN_LAYER[part]}.{kind}"
    return name


def _gguf_name(name: str) -> str:
    """The inverse of ``_hf_name``."""
    stem, _, kind = name.rpartition(".")
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if layer.isdecimal() and part in _GGUF_STEMS:
        return f"blk.{layer}.{_GGUF_STEMS[part]}.{kind}"
    return f"{_GGUF_STEMS[stem]}.{kind}" if stem in _GGUF_STEMS else name


def _halves_order(rows: Tensor, n_heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: its RoPE pairs neighbours (2i, 2i + 1) of a head,
    Hugging Face's pairs (i, i + head_dim / 2)."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _dequantise(path: Path, entry: GgufTensor) -> Tensor:
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    raw = np.fromfile(path, np.uint8, entry.stop - entry.start, offset=entry.start)
    if raw.nbytes != entry.stop - entry.start:
        raise LoadError(f"{path}: the tensor {entry.name!r} could not be read whole.")
    kind = GGMLQuantizationType[entry.type_name]
    try:
        values = dequantize(raw.reshape(*entry.shape[:-1], -1), kind)
    except NotImplementedError:
        raise LoadError(
            f"{path}: the tensor {entry.name!r} is stored as {entry.type_name}, which the gguf "
            "package cannot dequantise."
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(entry.shape)


def _rope_factors(header: GgufHeader, config: ModelConfig) -> Tensor | None:
    entry = header.tensors.get(_ROPE_FACTORS)
    if entry is None:
        return None
    if entry.shape != (config.head_dim // 2,):
        raise LoadError(
            f"{header.path}: the tensor {_ROPE_FACTORS!r} has shape {entry.shape}; the head "
            f"dimension {config.head_dim} asks for {(config.head_dim // 2,)}."
        )
    factors = _dequantise(header.path, entry)
    if not bool((factors > 0).all()):
        raise LoadError(
            f"{header.path}: the tensor {_ROPE_FACTORS!r} holds values that are not > 0."
        )
    return factors


def load_gguf(
    path: Path, dtype: torch.dtype = torch.float32, track: Track = no_progress
) -> Checkpoint:
    """Read a Llama-family GGUF file; quantised tensors are dequantised to ``dtype``.

    Args:
        path: the file.
        dtype: dtype of the returned tensors; dequantisation itself is float32.
        track: wraps the loop over tensors to show progress.

    Raises:
        LoadError: the file is missing, damaged, truncated or of another architecture, a tensor is
            missing or has another shape than the metadata asks for.
    """
    header = read_header(path)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    config = config_from_gguf(header.metadata, shapes, str(path))
    names = {_hf_name(name): name for name in shapes if name != _ROPE_FACTORS}
    check_shapes({hf: shapes[name] for hf, name in names.items()}, config, str(path), _gguf_name)
    tokenizer = tokenizer_from_gguf(header.metadata, str(path))
    tensors: dict[str, Tensor] = {}
    for hf_name in track(list(names), "dequantising"):
        rows = _dequantise(path, header.tensors[names[hf_name]])
        if ".self_attn.q_proj." in hf_name:
            rows = _halves_order(rows, config.n_heads)
        elif ".self_attn.k_proj." in hf_name:
            rows = _halves_order(rows, config.n_kv_heads)
        tensors[hf_name] = rows.to(dtype).contiguous()
    formats = sorted({tensor.type_name for tensor in header.tensors.values()})
    return Checkpoint(
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        rope_factors=_rope_factors(header, config),
        path=path,
        weight_format=f"GGUF, {', '.join(formats)}",
    )
