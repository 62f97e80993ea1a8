"""The csrc part of ``sanitize.py``: every kernel that differs in how its threads meet, once.

Inputs are made on the CPU and copied by the driver, and results are compared on the CPU. So hardly
a kernel but ours runs, and initcheck knows every byte that a kernel may read. Sizes are the
smallest that reach a kernel's path on an H200: plans count its 132 multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops.ops.histogram import bincount, expert_histogram, histogram
from fusedops.ops.reduce import reduce
from fusedops.ops.transpose import transpose
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_copy import UNROLLS, copy
from fusedops.providers.cuda_sampling import top_k

__all__ = ["FAMILIES", "Case"]

Case = tuple[str, Callable[[], bool]]

BF16, F32 = torch.bfloat16, torch.float32
_RELATIVE = {torch.float32: 1e-4, torch.float8_e4m3fn: 0.13}
"""Allowed difference relative to the value: float32 sums in another order, one step of e4m3, and
two steps of bfloat16 for the others."""


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal values on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def whole(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high) on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def moved(value: Any) -> Any:
    """A tensor on the GPU with its strides and offset; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    storage = value.as_strided((elements,), (1,), 0).cuda()
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def listed(result: Any) -> list[Tensor]:
    """An operation's results as a list."""
    return [result] if isinstance(result, Tensor) else list(result)


def alike(got: Tensor, expected: Tensor) -> bool:
    """Equal integers; floats within the rounding of another order of additions."""
    got = got.cpu()
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return False
    if got.dtype is torch.int8:
        return bool(((got.int() - expected.int()).abs() <= 1).all())
    if not got.is_floating_point():
        return torch.equal(got, expected)
    relative = _RELATIVE.get(got.dtype, 2.0**-6)
    wide, right = got.float(), expected.float()
    finite = right[right.isfinite()].abs()
    least = relative * 2.0**-6 * float(finite.amax()) if finite.numel() else 0.0
    return torch.allclose(wide, right, rtol=relative, atol=least, equal_nan=True)


def agrees(function: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Whether our kernels give what the definition gives on the CPU."""
    copies = [moved(arg) for arg in args]
    named = {name: moved(value) for name, value in options.items()}
    with use_provider("reference"):
        expected = listed(function(*args, **options))
    with use_provider("cuda"):
        got = listed(function(*copies, **named))
    return len(got) == len(expected) and all(map(alike, got, expected))


def case(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """A call to compare; ``args`` are tensors on the CPU."""
    return name, partial(agrees, function, *args, **options)


def transposes() -> Iterator[Case]:
    """Tiles with and without 16-byte loads and stores, the walk of a short side, a copy.

    Of rows that start anywhere, three tiles each way have one that touches no end of x.
    """
    for rows, columns in ((128, 128), (130, 128), (128, 130), (129, 131), (400, 209)):
        yield case(f"fp32 {rows}x{columns}", transpose, drawn(rows, columns, dtype=F32))
    for dtype in (torch.int8, torch.float64):
        x = whole(-99, 99, 2, 259, 321, dtype=dtype)
        yield case(f"{dtype} batch of 2", transpose, x)
        yield case(f"{dtype} aligned", transpose, x[:, :256, :320].contiguous())
    yield case("int8 inner tile", transpose, whole(-99, 99, 801, 723, dtype=torch.int8))
    yield case("bf16 inner tile", transpose, drawn(401, 749))
    yield case("bf16 view", transpose, drawn(3, 200, 280)[:, 1:, 3:])
    yield case("bf16 short side", transpose, drawn(1000, 3))
    yield case("bf16 column", transpose, drawn(1, 1003))


def converting_transposes() -> Iterator[Case]:
    """Rows of vectors, of less and at any address; one pass and several; casts; rows in order."""
    for rows, columns, dtype in (
        (256, 256, BF16),
        (300, 66, BF16),
        (131, 299, BF16),
        (131, 259, F32),
    ):
        x = drawn(rows, columns, dtype=dtype)
        for storage, granularity in (("e4m3", "token"), ("int8", "block128")):
            yield case(
                f"{dtype} {rows}x{columns} {granularity}",
                fusedops.transpose_quantize,
                x,
                dtype=storage,
                granularity=granularity,
            )
        target = F32 if dtype is BF16 else torch.float16
        yield case(f"{dtype} {rows}x{columns} cast", transpose, x, target)
    x, scale = drawn(3, 200, 137)[:, 1:, 3:], torch.full((402,), 0.02)
    yield case("given view", fusedops.transpose_quantize, x, scale=scale)
    yield case("batch", fusedops.transpose_quantize, x, granularity="block128")
    yield case("in order", fusedops.transpose_quantize, x.transpose(1, 2), granularity="block128")
    yield case("cast in order", transpose, x.transpose(1, 2), F32)


def reductions() -> Iterator[Case]:
    """Rows by lanes, blocks, a cluster and two launches; columns and gathered elements likewise."""
    shapes = {
        "rows of 40": ((300, 40), 1),
        "rows of 1023": ((300, 1023), 1),
        "cluster": ((3, 40_000), 1),
        "odd cluster": ((3, 39_999), 1),
        "split rows": ((2, 400_001), 1),
        "columns": ((64, 256), 0),
        "odd columns": ((65, 33), 0),
        "split columns": ((9_000, 64), 0),
        "many split columns": ((600, 4_096), 0),
    }
    for name, (shape, dim) in shapes.items():
        yield case(f"sum {name}", reduce, drawn(*shape, dtype=F32), "sum", dim)
    for op in ("argmax", "logsumexp"):
        for name in ("cluster", "split rows", "split columns"):
            shape, dim = shapes[name]
            yield case(f"{op} {name}", reduce, drawn(*shape, dtype=F32), op, dim)
    strided = drawn(64, 64, 128, dtype=F32)[:, :, ::2]
    yield case("max gathered", reduce, strided, "max", 1)
    yield case("sum gathered split", reduce, drawn(20_000, 6)[:, ::2], "sum", 0)
    yield case("any of flags", reduce, whole(0, 2, 33, 70, dtype=torch.bool), "any", 1)
    yield case("sum int32 of all", reduce, whole(-9, 9, 300_000, dtype=torch.int32), "sum", None)


def _copied(x: Tensor, unroll: int) -> bool:
    source = x.cuda()
    target = torch.empty_like(source)
    copy(source, target, unroll)
    return torch.equal(target.cpu(), x)


def copies() -> Iterator[Case]:
    """Each number of vectors a thread, with a tail."""
    for unroll in UNROLLS:
        yield f"unroll {unroll}", partial(_copied, drawn(4 * 2999, dtype=F32), unroll)


def _added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    fusedops.fused_add_rms_norm_(x, residual, weight)
    return x, residual


def norms() -> Iterator[Case]:
    """Rows shared by lanes, warps, a block and a cluster, element by element too, and each sink."""
    shapes = ((300, 64), (300, 1024), (3, 4096), (200, 4096), (3, 16_384), (3, 4095), (2, 9_999))
    for rows, columns in shapes:
        x, weight = drawn(rows, columns), drawn(columns)
        yield case(f"rms {rows}x{columns}", fusedops.rms_norm, x, weight)
        yield case(f"added {rows}x{columns}", fusedops.fused_add_rms_norm, x, x + 1, weight)
    x, weight, bias = drawn(5, 2048), drawn(2048), drawn(2048)
    yield case("added in place", _added, x.clone(), x + 1, weight)
    yield case("gemma", fusedops.rms_norm, x, weight.float(), round_before_weight=False)
    for columns in (2048, 16_384, 1001):
        x, weight, bias = drawn(5, columns), drawn(columns), drawn(columns)
        yield case(f"layer {columns}", fusedops.layer_norm, x, weight, bias)
        for dtype, granularity in (("e4m3", "token"), ("int8", "block128")):
            yield case(
                f"rms {columns} {dtype} {granularity}",
                fusedops.rms_norm_quantize,
                *(x, weight),
                dtype=dtype,
                granularity=granularity,
            )
    scale = torch.full((5,), 0.02)
    yield case("rms given", fusedops.rms_norm_quantize, x, weight, scale=scale)


def activations() -> Iterator[Case]:
    """Blocks of their own, rows that share a scale in one block and in a cluster, odd sizes."""
    for rows, columns in ((3, 256), (3, 14_336), (300, 2048), (5, 1715)):
        x = drawn(rows, 2 * columns)
        yield case(f"silu {rows}x{columns}", fusedops.act_and_mul, x)
        for dtype, granularity in (("e4m3", "block128"), ("int8", "token")):
            yield case(
                f"gelu_tanh {rows}x{columns} {dtype} {granularity}",
                fusedops.act_and_mul_quantize,
                *(x, "gelu_tanh"),
                dtype=dtype,
                granularity=granularity,
            )


def quantizations() -> Iterator[Case]:
    """A scale a row, a group of 128, a tensor (two launches), and one that is given."""
    for rows, columns in ((5, 4096), (5, 1000), (3, 20_000), (300, 333)):
        x = drawn(rows, columns)
        for granularity in ("token", "block128", "tensor"):
            name = f"{granularity} {rows}x{columns}"
            yield case(name, fusedops.quantize, x, granularity=granularity)
        yield case(
            f"given {rows}x{columns}", fusedops.quantize, x, "int8", scale=torch.full((rows,), 0.02)
        )


def histograms() -> Iterator[Case]:
    """Counters of threads, of blocks in one sweep and in two, global ones, and none at all."""
    for dtype, bins in ((torch.uint8, 256), (torch.int32, 256), (torch.int64, 4096)):
        yield case(f"{dtype} {bins}", bincount, whole(0, bins, 50_001, dtype=dtype), bins)
    for bins in (65_536, 300_000):
        x = whole(-9, bins + 9, 30_001, dtype=torch.int32)
        yield case(f"int32 {bins}", bincount, x, bins)
    one = torch.full((40_000,), 7, dtype=torch.int32)
    yield case("one value", bincount, one, 4096)
    yield case("view", bincount, whole(0, 99, 200, 64, dtype=torch.int32)[:, 1:50], 99)
    yield case("empty", bincount, one[:0], 4096)
    for bins in (100, 5000):
        x = drawn(30_001, dtype=F32)
        yield case(f"samples {bins}", histogram, x, bins, range=(-2.0, 2.0))


def experts() -> Iterator[Case]:
    """One block, and the five launches for more ids than it takes."""
    for count in (1, 999, 70_001):
        ids = whole(-1, 65, count, dtype=torch.int32)
        yield case(f"{count} ids", expert_histogram, ids, 64)


def _largest(x: Tensor, k: int) -> bool:
    values, indices = (result.cpu() for result in top_k(x.cuda(), k))
    expected = x.topk(k, dim=1).values
    return torch.equal(values, expected) and torch.equal(x.gather(1, indices), expected)


def samplings() -> Iterator[Case]:
    """A row in one block and in a cluster, cut in each way; the maximum; sorted top-k."""
    for columns in (1000, 9001):
        for dtype in (F32, BF16):
            logits = 2 * drawn(3, columns, dtype=dtype)
            temperature, seed = torch.tensor([1.0, 0.7, 0.0]), torch.tensor([1, 2, 3])
            k = torch.tensor([50, 0, 3], dtype=torch.int32)
            p = torch.tensor([0.9, 0.5, 1.0])
            cuts = {
                "free": {},
                "k": {"top_k": k},
                "p": {"top_p": p},
                "kp": {"top_k": k, "top_p": p},
            }
            for name, cut in cuts.items():
                label = f"{name} {columns} {dtype}"
                yield case(label, fusedops.sample, logits, temperature, seed, **cut)
            yield case(f"greedy {columns} {dtype}", fusedops.greedy, logits)
            yield f"top 50 {columns} {dtype}", partial(_largest, logits, 50)


def _turned(*args: Any, **options: Any) -> list[Tensor]:
    fusedops.rope_append_paged_kv_(*args, **options)
    return [args[place] for place in (0, 1, 5, 6)]


def _appended(*args: Any, **options: Any) -> list[Tensor]:
    fusedops.append_paged_kv(*args, **options)
    return list(args[2:4])


def ropes() -> Iterator[Case]:
    """Vectors and single elements, both styles and layouts, padding tokens, with and without."""
    for head_dim, rotary_dim, style, layout in (
        (128, 128, "halves", "NHD"),
        (80, 32, "interleaved", "HND"),
        (6, 2, "halves", "NHD"),
    ):
        tokens = 5
        qkv = drawn(tokens, 12, head_dim)
        q, k, v = qkv[:, :8].clone(), qkv[:, 8:10].clone(), qkv[:, 10:]
        positions = torch.tensor([0, 3, -1, 17, 30], dtype=torch.int32)
        table = fusedops.rope_table(rotary_dim, 40)
        shape = (6, 16, 2, head_dim) if layout == "NHD" else (6, 2, 16, head_dim)
        caches = torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16)
        pages = torch.tensor([[2, 4], [0, 5]], dtype=torch.int32)
        request = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32)
        name = f"{head_dim}/{rotary_dim} {style} {layout}"
        places = positions.clamp(min=0)
        yield case(f"rope {name}", fusedops.rope, qkv[:, :8], qkv[:, 8:10], places, table)
        yield case(
            f"append {name}",
            _appended,
            *(qkv[:, 8:10], v, caches[0].clone(), caches[1].clone(), pages, request, positions),
            layout=layout,
        )
        yield case(
            f"both {name}",
            _turned,
            *(q, k, v, positions, table, *caches, pages, request),
            style=style,
            layout=layout,
        )
        eight = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
        yield case(
            f"both {name} e4m3",
            _turned,
            *(q.clone(), k.clone(), v, positions, table, *eight, pages, request),
            k_scale=torch.tensor(0.02),
            v_scale=torch.full((2,), 0.03),
            style=style,
            layout=layout,
        )


def attentions() -> Iterator[Case]:
    """Tensor cores and float32, one block and sixteen, codes, a window, an empty request."""
    for dtype, cached, batch in ((BF16, BF16, 1), (F32, F32, 3), (BF16, torch.int8, 40)):
        lengths = whole(0, 1024, batch, dtype=torch.int32)
        table = whole(0, 70, batch, 64, dtype=torch.int32)
        codes = cached is torch.int8
        caches = [
            whole(-9, 9, 70, 16, 2, 64, dtype=cached)
            if codes
            else drawn(70, 16, 2, 64, dtype=dtype)
            for _ in range(2)
        ]
        scales = {f"{of}_scale": torch.full((2,), 0.1) for of in "kv"} if codes else {}
        q = drawn(batch, 8, 64, dtype=dtype)
        for window in (0, 100):
            name = f"attention {dtype} {cached} {batch} {window}"
            options = {**scales, "window": window}
            yield case(name, fusedops.paged_attention, q, *caches, table, lengths, **options)


def embeddings() -> Iterator[Case]:
    """Rows of vectors and of single elements, both kinds of ids, a strided table."""
    for columns, dtype in ((4096, torch.int64), (72, torch.int32), (33, torch.int64)):
        ids = whole(0, 50, 3, 7, dtype=dtype)
        for function in (fusedops.embedding, fusedops.embedding_sumsq):
            name = f"{function.__name__} {columns} {dtype}"
            yield case(name, function, ids, drawn(50, columns))
    yield case("columns", fusedops.embedding, whole(0, 50, 9, dtype=torch.int64), drawn(64, 50).t())


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "transpose": transposes,
    "transpose_quantize": converting_transposes,
    "reduce": reductions,
    "copy": copies,
    "norm": norms,
    "activation": activations,
    "quantize": quantizations,
    "histogram": histograms,
    "experts": experts,
    "sampling": samplings,
    "rope_append": ropes,
    "attention_decode": attentions,
    "embedding": embeddings,
}
"""Cases by the file of csrc that has the kernels."""
