"""scripts/sanitize.py without a GPU: its families, its refusals, and its cases as they are run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusedops.config import prefill_tiles
from fusedops.jit.resources import csrc_dir
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_copy import UNROLLS
from fusedops.quant import SCHEMES

LONGEST = 512
"""Elements that a dimension of a case has at most on the CPU, but for one more of odd sizes."""

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """``sanitize`` and ``sanitize_cuda``, imported as the script imports them."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("sanitize"), importlib.import_module("sanitize_cuda")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def cuda_cases(
    scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The cases of csrc, with the definitions in place of the kernels, of tensors cut short.

    Sizes count multiprocessors; what an operation accepts, a short row shows as well as a long one.
    """
    module = scripts[1]
    drawn = module.drawn

    def cut(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        # Odd sizes stay odd, and equal ones equal.
        return drawn(*(min(size, LONGEST + size % 2) for size in shape), dtype=dtype)

    @contextmanager
    def on_cpu(name: str) -> Iterator[object]:
        with use_provider("reference") as usage:
            yield usage

    monkeypatch.setattr(module, "drawn", cut)
    monkeypatch.setattr(module, "use_provider", on_cpu)
    monkeypatch.setattr(
        module, "moved", lambda value: value.clone() if isinstance(value, torch.Tensor) else value
    )
    return module


def test_every_file_of_csrc_is_a_family(scripts: tuple[ModuleType, ModuleType]) -> None:
    files = {path.stem for path in csrc_dir().glob("*.cu")} - {"probe"}
    assert set(scripts[1].FAMILIES) == files


def test_names_and_groups_choose_families(scripts: tuple[ModuleType, ModuleType]) -> None:
    families = scripts[0].families
    gemms = ["decode", "norm_gemm", "prefill", "split"]
    assert families(["gemm"]) == gemms
    assert families([]) == [*gemms, *SCHEMES, *scripts[1].FAMILIES]
    assert families(["quant"]) == list(SCHEMES)
    assert families(["norm", "csrc"])[0] == "norm"
    assert len(families(["norm", "csrc"])) == len(scripts[1].FAMILIES)
    with pytest.raises(ValueError, match="unknown nothing; accepted are gemm, quant, csrc, decode"):
        families(["nothing"])


def test_every_tile_that_splits_k_is_launched(scripts: tuple[ModuleType, ModuleType]) -> None:
    names = {name.partition(" ")[0] for name, _ in scripts[0].split()}
    assert names == {tile.name for tile in prefill_tiles() if tile.split > 1}
    assert {int(name[-1]) for name in names} == {2, 4, 8}
    finished = [tile.tile_n // tile.split for tile in prefill_tiles() if tile.split > 1]
    assert f"has {min(finished)} to {max(finished)} of" in scripts[0].split.__doc__


@pytest.mark.parametrize(
    "family",
    [
        *("transpose", "transpose_quantize", "reduce", "norm", "activation", "quantize"),
        *("histogram", "experts", "rope_append", "attention_decode", "embedding"),
    ],
)
def test_cases_are_calls_that_the_operations_accept(cuda_cases: ModuleType, family: str) -> None:
    cases = list(cuda_cases.FAMILIES[family]())
    assert len({name for name, _ in cases}) == len(cases)
    assert [name for name, run in cases if not run()] == []


def test_sampled_rows_are_calls_that_the_operations_accept(cuda_cases: ModuleType) -> None:
    cases = dict(cuda_cases.FAMILIES["sampling"]())
    assert [name for name, run in cases.items() if "top 50" not in name and not run()] == []
    assert len(list(cuda_cases.FAMILIES["copy"]())) == len(UNROLLS)


def test_quantized_layers_are_compared_with_the_reference(
    scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("sanitize_quant")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "PROVIDER", "reference")
    monkeypatch.setattr(module, "ROWS", (1, 3))
    for name in SCHEMES:
        assert all(run() for _, run in module.FAMILIES[name]())
    monkeypatch.setattr(module, "BOUND", -1.0)
    assert not any(run() for _, run in module.FAMILIES["int4"]())


def test_a_wrong_result_is_told(cuda_cases: ModuleType) -> None:
    alike = cuda_cases.alike
    x = torch.tensor([1.0, -2.0, float("nan")])
    assert alike(x.clone(), x)
    assert not alike(x + 0.01, x)
    assert not alike(x.double(), x)
    assert not alike(x[:2], x)
    assert alike(x.bfloat16() * 1.01, x.bfloat16())
    assert not alike(x.bfloat16() * 1.05, x.bfloat16())
    q = torch.tensor([3, 5], dtype=torch.int8)
    assert alike(q + 1, q)
    assert not alike(q + 2, q)
    assert not alike(q.int() + 1, q.int())
    fp8 = torch.tensor([1.0, 16.0]).to(torch.float8_e4m3fn)
    assert alike(torch.tensor([1.125, 16.0]).to(torch.float8_e4m3fn), fp8)
    assert not alike(torch.tensor([1.25, 16.0]).to(torch.float8_e4m3fn), fp8)


def test_a_tensor_keeps_its_place_in_memory_when_it_moves(
    scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    x = torch.arange(60.0).view(6, 10)[1:, 3:9:2].t()
    moved = scripts[1].moved(x)
    assert torch.equal(moved, x)
    assert (moved.stride(), moved.storage_offset()) == (x.stride(), x.storage_offset())
    assert moved.data_ptr() != x.data_ptr()
    assert scripts[1].moved("name") == "name"
