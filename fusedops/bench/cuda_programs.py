"""Which kernels of csrc a model's operations take, found without a GPU: plans need only sizes.

The operations are those of a decoder around its products: embedding, norms, the gated activation
where it is not in an epilogue, RoPE with the paged append, attention of a decode step without a
soft cap, and the choice of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.sizes import ModelSizes
from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_activation import ACT_AND_MUL, plan_act_and_mul
from fusedops.providers.cuda_attention import PAGED_ATTENTION, UNIT, WARPS, plan_paged_attention
from fusedops.providers.cuda_call import CallPlan
from fusedops.providers.cuda_embedding import (
    EMBEDDING,
    EMBEDDING_SUMSQ,
    plan_embedding,
    plan_embedding_sumsq,
)
from fusedops.providers.cuda_norm import FUSED_ADD_RMS_NORM, RMS_NORM, plan_norm
from fusedops.providers.cuda_plan import VECTOR_BYTES, Gpu, View
from fusedops.providers.cuda_rope import (
    APPEND,
    ROPE,
    ROPE_,
    ROPE_APPEND,
    plan_append,
    plan_rope,
    plan_rope_,
    plan_rope_append,
)
from fusedops.providers.cuda_sampling import GREEDY, SAMPLE, plan_greedy, plan_sample
from fusedops.providers.cuda_sinks import FORMATS, Served

__all__ = ["model_programs", "rows_to_plan"]

_PAGE_SIZE = 16
_BLOCKS_PER_SM = 8
"""Rows beyond so many for each multiprocessor change no layout of csrc/include/row.cuh."""


_ATTENTION_OPTIONS = (1, 1.0, True, 0, 0.0, "NHD")
"""Its last arguments: one query a request, a scale, causal, no window and no soft cap."""

_Call = tuple[Served, Callable[..., CallPlan], tuple[Any, ...]]
"""How a call is served, what plans it, and the operation's arguments in the schema's order."""


def rows_to_plan(most: int, gpu: Gpu) -> list[int]:
    """Every number of rows up to ``most`` at which a kernel may be another one than before."""
    last = min(most, _BLOCKS_PER_SM * gpu.sms + 1)
    return [*range(1, last + 1), *([most] if most > last else [])]


def model_programs(sizes: ModelSizes, dtype: torch.dtype, most: int, gpu: Gpu) -> list[CudaProgram]:
    """The programs of csrc that a model's operations ask the store for.

    A call that the kernels do not serve takes none.

    Args:
        sizes: the model's.
        dtype: of activations, weights and the cache, which may have 8 bits instead.
        most: tokens of one prefill; every number of rows up to it is provided for.
        gpu: where they are to run.

    Returns:
        each program once, one kernel a program as the provider loads them.
    """
    found: dict[CudaProgram, None] = {}
    for served, plan, args in _calls(sizes, dtype, most, gpu):
        tensors, options = served.split(*args)
        views = [None if tensor is None else _view(tensor) for tensor in tensors]
        try:
            launches = plan(views, gpu, *options).launches
        except UnsupportedError:
            continue
        found.update(dict.fromkeys(launch.program for launch in launches))
    return list(found)


def _view(x: Tensor) -> View:
    """``view_of`` of memory that does not exist but begins where an allocator has it begin."""
    offset = int(x.storage_offset()) * x.element_size() % VECTOR_BYTES
    return View(tuple(x.shape), x.stride(), x.dtype, offset & -offset or VECTOR_BYTES)


def _new(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _calls(sizes: ModelSizes, dtype: torch.dtype, most: int, gpu: Gpu) -> Iterator[_Call]:
    hidden, vocabulary = sizes.hidden_size, sizes.vocab_size
    weight = _new(hidden, dtype=dtype)
    table = _new(vocabulary, hidden, dtype=dtype)
    for rows in rows_to_plan(most, gpu):
        x = _new(rows, hidden, dtype=dtype)
        # Llama's order of rounding, as nn.RMSNorm asks for it; eps and offset choose no kernel.
        yield RMS_NORM, plan_norm, (x, weight, 1e-6, 0.0, True)
        yield FUSED_ADD_RMS_NORM, plan_norm, (x, x, weight, 1e-6, 0.0, True)
        gate_up = _new(rows, 2 * sizes.intermediate_size, dtype=dtype)
        yield ACT_AND_MUL, plan_act_and_mul, (gate_up, sizes.activation)
        logits = _new(rows, vocabulary, dtype=dtype)
        one_each, seeds = _new(rows, dtype=torch.float32), _new(rows, dtype=torch.int64)
        yield GREEDY, plan_greedy, (logits,)
        yield SAMPLE, plan_sample, (logits, one_each, seeds, None, None)
        for index_dtype in (torch.int32, torch.int64):
            ids = _new(rows, dtype=index_dtype)
            yield EMBEDDING, plan_embedding, (ids, table)
            yield EMBEDDING_SUMSQ, plan_embedding_sumsq, (ids, table)
    yield from _cache_calls(sizes, dtype)
    yield from _attention_calls(sizes, dtype, most)


def _cache_dtypes(dtype: torch.dtype) -> Iterator[tuple[torch.dtype, tuple[Tensor | None, ...]]]:
    """What a cache may hold, with its two scales."""
    yield dtype, (None, None)
    scale = _new(dtype=torch.float32)
    for _, stored in FORMATS.values():
        yield stored, (scale, scale)


def _attention_calls(sizes: ModelSizes, dtype: torch.dtype, most: int) -> Iterator[_Call]:
    """Decode steps of 1, 2, 4, ... requests: with twice as many, clusters have half the blocks.

    So they have where a request's pages hold fewer keys than a cluster attends at once.
    """
    for requests in (1 << doublings for doublings in range(most.bit_length())):
        q = _new(requests, sizes.n_heads, sizes.head_dim, dtype=dtype)
        lengths = _new(requests, dtype=torch.int32)
        for blocks in (1, 2, 4, 8, 16):
            table = _new(requests, blocks * WARPS * UNIT // _PAGE_SIZE, dtype=torch.int32)
            for stored, scales in _cache_dtypes(dtype):
                cache = _new(1, _PAGE_SIZE, sizes.n_kv_heads, sizes.head_dim, dtype=stored)
                tensors = (q, cache, cache, table, lengths, None, *scales)
                yield PAGED_ATTENTION, plan_paged_attention, (*tensors, *_ATTENTION_OPTIONS)


def _cache_calls(sizes: ModelSizes, dtype: torch.dtype) -> Iterator[_Call]:
    """RoPE and the append of one token; more tokens are more blocks of the same kernels."""
    heads, kv_heads = sizes.n_heads, sizes.n_kv_heads
    qkv = _new(1, heads + 2 * kv_heads, sizes.head_dim, dtype=dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    positions = _new(1, dtype=torch.int32)
    cos_sin = _new(1, sizes.head_dim, dtype=torch.float32)
    yield ROPE, plan_rope, (q, k, positions, cos_sin, "halves")
    yield ROPE_, plan_rope_, (q, k, positions, cos_sin, "halves")
    pages = _new(1, 1, dtype=torch.int32)
    for stored, scales in _cache_dtypes(dtype):
        cache = _new(1, _PAGE_SIZE, kv_heads, sizes.head_dim, dtype=stored)
        places = (cache, cache, pages, positions)
        yield APPEND, plan_append, (k, v, *places, positions, *scales, "NHD")
        both = (q, k, v, positions, cos_sin, *places, *scales)
        yield ROPE_APPEND, plan_rope_append, (*both, "halves", "NHD")
