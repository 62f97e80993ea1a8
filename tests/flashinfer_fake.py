"""A stand-in for the flashinfer package: same signatures, same addressing, computed in torch.

Like the kernels it stands for it checks no index: a position outside a table or a padding row that
reaches it reads or writes the wrong place, or fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.providers import flashinfer_attention, flashinfer_base, flashinfer_decode

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class Fake:
    """What a test can set and see of the stand-in."""

    calls: list[str] = field(default_factory=list)
    wrappers: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    built: bool = True
    capturing: bool = False


def install(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put the stand-in in place of flashinfer, and let CPU tensors pass for CUDA tensors."""
    fake = Fake()
    for name in ("", "norm", "activation", "rope", "page", "decode", "prefill", "jit"):
        add_module(monkeypatch, fake, f"flashinfer.{name}".rstrip("."))
    for name in ("norm", "rope", "page", "activation"):
        add_module(monkeypatch, fake, f"flashinfer.jit.{name}")
        spec = property(lambda _self: fake.built)
        described = type("Spec", (), {"is_compiled": spec})()
        maker = "gen_act_and_mul_module" if name == "activation" else f"gen_{name}_module"
        setattr(fake.modules[f"flashinfer.jit.{name}"], maker, lambda *_args, d=described: d)
    add_kernels(fake)
    monkeypatch.setattr(flashinfer_base, "is_cuda", lambda _tensor: True)
    monkeypatch.setattr(flashinfer_base, "_ready", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_args: SimpleNamespace(cuda_stream=7))
    # The size that flashinfer recommends would only be cleared here, at 20 ms a test.
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(flashinfer_decode, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(fake))
    # Norms would otherwise come from the CuTe DSL wherever that is installed.
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    forget()
    return fake


def forget() -> None:
    """Forget what was looked up once a process."""
    flashinfer_base.absent.cache_clear()
    flashinfer_base.unbuilt.cache_clear()
    flashinfer_base.norm_uses_dsl.cache_clear()
    flashinfer_attention._wrapper.cache_clear()


def add_module(monkeypatch: pytest.MonkeyPatch, fake: Fake, name: str) -> None:
    """Put an empty module of that name into sys.modules."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    fake.modules[name] = module
    monkeypatch.setitem(sys.modules, name, module)


@dataclass
class FakeEvent:
    """A CUDA event that notes when it is recorded and waited for."""

    fake: Fake

    def record(self, _stream: Any) -> None:
        """Note a record."""
        self.fake.events.append("record")

    def synchronize(self) -> None:
        """Note a wait."""
        self.fake.events.append("synchronize")


def add_kernels(fake: Fake) -> None:
    """Fill the modules with functions of flashinfer's signatures."""
    norm = fake.modules["flashinfer.norm"]

    def normalised(x: Tensor, weight: Tensor, bias: float, eps: float) -> Tensor:
        assert weight.dtype is not torch.float32, "the kernel reads half precision weights"
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + bias)

    def make_norm(name: str, bias: float) -> None:
        def rmsnorm(
            input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None
        ) -> Tensor:
            assert input.dim() == 2
            fake.calls.append(name)
            assert out is not None
            return out.copy_(normalised(input.float(), weight, bias, eps))

        def fused(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
            assert input.dim() == residual.dim() == 2
            fake.calls.append(name.replace("rmsnorm", "fused_add_rmsnorm"))
            total = input.float() + residual.float()
            residual.copy_(total)
            input.copy_(normalised(total, weight, bias, eps))

        setattr(norm, name, rmsnorm)
        setattr(norm, name.replace("rmsnorm", "fused_add_rmsnorm"), fused)

    make_norm("rmsnorm", 0.0)
    make_norm("gemma_rmsnorm", 1.0)

    def make_act(act: str) -> None:
        def act_and_mul(input: Tensor) -> Tensor:
            fake.calls.append(f"{act}_and_mul")
            gate, up = input.float().chunk(2, -1)
            return (ACTIVATIONS[act](gate) * up).to(input.dtype)

        setattr(fake.modules["flashinfer.activation"], f"{act}_and_mul", act_and_mul)

    for act in ACTIVATIONS:
        make_act(act)

    def apply_rope_with_cos_sin_cache(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> tuple[Tensor, Tensor]:
        fake.calls.append("apply_rope_with_cos_sin_cache")
        assert is_neox
        assert query.dim() == key.dim() == 2
        assert int(positions.min()) >= 0, "the kernel reads before the table"
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)

        def rotated(x: Tensor) -> Tensor:
            heads = x.reshape(x.shape[0], -1, head_size).float()
            part, rest = heads.split([cos.shape[-1] * 2, head_size - cos.shape[-1] * 2], -1)
            a, b = part.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
            return turned.flatten(1).to(x.dtype)

        return rotated(query), rotated(key)

    fake.modules["flashinfer.rope"].apply_rope_with_cos_sin_cache = apply_rope_with_cos_sin_cache

    def append_paged_kv_cache(
        append_key: Tensor,
        append_value: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        kv_indices: Tensor,
        kv_indptr: Tensor,
        kv_last_page_len: Tensor,
        kv_layout: str = "NHD",
    ) -> None:
        fake.calls.append("append_paged_kv_cache")
        assert kv_indptr.numel() == kv_last_page_len.numel() + 1
        for metadata in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
            assert metadata.dtype is torch.int32
            assert metadata.is_contiguous()
        for new, cache in zip((append_key, append_value), paged_kv_cache, strict=True):
            slots = cache if kv_layout == "NHD" else cache.transpose(1, 2)
            page_size = slots.shape[1]
            for row, request, position in zip(
                new, batch_indices.tolist(), positions.tolist(), strict=True
            ):
                page, slot = divmod(int(kv_indptr[request]) * page_size + position, page_size)
                slots[int(kv_indices[page]), slot] = row

    fake.modules["flashinfer.page"].append_paged_kv_cache = append_paged_kv_cache
    fake.modules["flashinfer.decode"].BatchDecodeWithPagedKVCacheWrapper = make_wrapper(fake, False)
    fake.modules["flashinfer.prefill"].BatchPrefillWithPagedKVCacheWrapper = make_wrapper(
        fake, True
    )


def make_wrapper(fake: Fake, prefill: bool) -> type:
    """The class of a planner and launcher; like flashinfer's it computes from its CSR buffers."""

    class Wrapper:
        def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **options: Any) -> None:
            self.workspace, self.layout, self.made_with = float_workspace_buffer, kv_layout, options
            self.buffers = {
                name: options.get(f"paged_kv_{name}_buffer")
                for name in ("indptr", "indices", "last_page_len")
            }
            self.planned: dict[str, Any] = {}
            fake.wrappers.append(self)

        def plan(self, *args: Any, **options: Any) -> None:
            fake.calls.append("plan")
            fake.events.append("plan")
            first = args[0] if prefill else None
            csr, numbers = (args[1:4], args[4:]) if prefill else (args[:3], args[3:])
            names = ("query_heads", "kv_heads", "head_dim", "page_size")
            self.planned = {**dict(zip(names, numbers, strict=True)), **options, "qo_indptr": first}
            for (name, buffer), new in zip(self.buffers.items(), csr, strict=True):
                assert new.dtype is torch.int32
                if buffer is None or not self.made_with.get("use_cuda_graph"):
                    self.buffers[name] = new.clone()
                else:
                    buffer[: len(new)].copy_(new)

        def run(self, q: Tensor, caches: Any, out: Tensor | None = None) -> Tensor:
            fake.calls.append("run")
            indptr, last = self.buffers["indptr"].tolist(), self.buffers["last_page_len"].tolist()
            offsets = self.planned["qo_indptr"]
            offsets = list(range(len(q) + 1)) if offsets is None else offsets.tolist()
            assert offsets[-1] == len(q)
            # Empty requests: what a kernel leaves there is not the provider's to rely on.
            result = torch.full_like(q, torch.nan) if out is None else out.fill_(torch.nan)
            for request, used in enumerate(last):
                pages = self.buffers["indices"][indptr[request] : indptr[request + 1]].long()
                length = max(len(pages) - 1, 0) * self.planned["page_size"] + used
                rows = slice(offsets[request], offsets[request + 1])
                if length and rows.stop > rows.start:
                    result[rows] = self._attend(q[rows], caches, pages, length)
            return result

        def _attend(self, q: Tensor, caches: Any, pages: Tensor, length: int) -> Tensor:
            plan = self.planned
            group = plan["query_heads"] // plan["kv_heads"]
            k, v = (
                (c if self.layout == "NHD" else c.transpose(1, 2))[pages]
                .flatten(0, 1)[:length]
                .double()
                .repeat_interleave(group, 1)
                for c in caches
            )
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * plan["sm_scale"]
            if plan["logits_soft_cap"]:
                scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
            own = torch.arange(length - len(q), length)[:, None]
            key = torch.arange(length)
            seen = torch.ones(len(q), length, dtype=torch.bool)
            if plan.get("causal", True):
                seen &= key <= own
            if plan["window_left"] >= 0:
                seen &= key >= own - plan["window_left"]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    return Wrapper
