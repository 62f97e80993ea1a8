"""Weights of 4 and 8 bits in the provider ``cutlass``: what it takes, what it refuses and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_cutlass_compile import needs_dsl
from torch import Tensor

from fusedops.config import mixed_tiles, tuning_key
from fusedops.config.mixed import NarrowWeight
from fusedops.config.mixed_tiles import narrow_weight
from fusedops.epilogue.chain import Epilogue
from fusedops.errors import ConfigError
from fusedops.jit.dsl import compile_dsl
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import Prologue
from fusedops.providers import cutlass, cutlass_mixed
from fusedops.providers.cutlass import CutlassProvider, choose_candidate
from fusedops.providers.cutlass_mixed import MixedCandidate, kernel_layout
from fusedops.providers.kernel_tensors import operands_read
from fusedops.weight import BlockFp8, Dense, Fp8Weight, GroupedFormat, Int4, Int8Weight
from fusedops.weight.fragments import words

BF16, FP16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
N, K = 4096, 4096
FORMATS: list[tuple[GroupedFormat, torch.dtype]] = [
    (Int4(N, K, 128, "none", "wgmma16"), BF16),
    (Int4(N, K, 32, "uint8", "wgmma16"), FP16),
    (Int4(N, K, 0, "uint8", "wgmma16"), BF16),
    (Int4(N, K, 128, "none", "wgmma8"), E4M3),
    (Int8Weight(N, K, 0, "wgmma16"), BF16),
    (Fp8Weight(N, K, 64, "wgmma16"), FP16),
]


def mixed_problem(
    weight: GroupedFormat, x_dtype: torch.dtype = BF16, m: int = 16, chain: str = "none"
) -> GemmProblem:
    out_dtype = BF16 if x_dtype == E4M3 else x_dtype
    epilogue = Epilogue.parse(chain)
    spec = GemmSpec(weight, epilogue, epilogue.result_dtype(out_dtype))
    own = len(weight.operands())
    scale = F32 if weight.groups == 1 else BF16
    dtypes = [scale, torch.uint8][:own] + [
        out_dtype if out_dtype in o.dtypes else o.dtypes[0] for o in spec.operands[own:]
    ]
    return GemmProblem(
        spec, m, x_dtype, tuple(dtypes), "cuda", 132, arch="sm_90a", gpu="NVIDIA H200"
    )


def refusal(problem: GemmProblem) -> str:
    answer = CutlassProvider().supports(problem)
    assert not answer.ok
    with pytest.raises(ConfigError):
        choose_candidate(problem)
    return answer.reason


@pytest.mark.parametrize(("weight", "dtype"), FORMATS, ids=str)
@pytest.mark.parametrize("m", [1, 16, 128])
def test_formats_in_fragments_are_served(weight: GroupedFormat, dtype: torch.dtype, m: int) -> None:
    problem = mixed_problem(weight, dtype, m, "bias|residual")
    pytest.importorskip("cutlass")
    assert CutlassProvider().supports(problem).ok
    candidate = choose_candidate(problem)
    assert isinstance(candidate, MixedCandidate)
    assert candidate.tile.legal(problem) is None
    assert f"weight-only kernel {candidate.name}" in CutlassProvider().describe(problem)


def test_what_the_kernel_is_compiled_for_follows_from_the_problem() -> None:
    narrow = [narrow_weight(mixed_problem(weight, dtype)) for weight, dtype in FORMATS]
    assert narrow == [
        NarrowWeight("int4", 128, False, BF16, 16),
        NarrowWeight("int4", 32, True, BF16, 16),
        NarrowWeight("int4", 0, True, F32, 16),
        NarrowWeight("int4", 128, False, BF16, 8),
        NarrowWeight("int8", 0, False, F32, 16),
        NarrowWeight("e4m3", 64, False, BF16, 16),
    ]


@needs_dsl
@pytest.mark.parametrize(("weight", "dtype"), FORMATS[1:4:2], ids=str)
def test_a_candidate_compiles(weight: GroupedFormat, dtype: torch.dtype, tmp_path: Any) -> None:
    program = choose_candidate(mixed_problem(weight, dtype, 16, "bias")).program()
    compile_dsl(program, "sm_90a", tmp_path)
    names = [name for name, _ in program.sources.files]
    assert any("fragments" in name for name in names)
    assert any("config/mixed" in name or "config.mixed" in name for name in names)


def test_refusals_say_why() -> None:
    form = Int4(N, K, 128, "none", "wgmma16")
    rows = mixed_problem(replace(form, layout="rows"))
    assert "takes int4 beside torch.bfloat16 in the layout wgmma16, got rows" in refusal(rows)
    eight = mixed_problem(replace(form, layout="rows"), E4M3)
    assert "in the layout wgmma8, got rows" in refusal(eight)
    assert "got torch.float32" in CutlassProvider().supports(mixed_problem(form, F32)).reason
    normed = mixed_problem(form)
    spec = replace(normed.spec, prologue=Prologue.parse("rms_norm"))
    dtypes = (BF16,) * len(spec.prologue.operands()) + normed.operand_dtypes
    assert "inside beside int4" in refusal(replace(normed, spec=spec, operand_dtypes=dtypes))
    assert "whole groups" in refusal(mixed_problem(form, chain="quantize(e4m3,group128)"))
    assert "too few parts" in refusal(mixed_problem(form, chain="row_stat(sumsq,2)"))
    assert "multiples of 16 bytes" in refusal(replace(mixed_problem(form), aligned_bytes=8))


def test_batch_invariant_products_do_not_split_k() -> None:
    problem = mixed_problem(Int4(1024, 8192, 128, "none", "wgmma16"))
    invariant = replace(problem, spec=replace(problem.spec, batch_invariant=True))
    assert choose_candidate(problem).name.endswith(("s2", "s4"))
    chosen = choose_candidate(invariant)
    assert isinstance(chosen, MixedCandidate)
    assert chosen.tile.split == 1


def test_choices_are_filed_by_the_formats_options() -> None:
    keys = [tuning_key(mixed_problem(weight, dtype)) for weight, dtype in FORMATS]
    assert keys[0] == "n4096 k4096 m16 bfloat16 plain int4 layout=wgmma16"
    assert keys[1] == "n4096 k4096 m16 float16 plain int4 group=32 zero=uint8 layout=wgmma16"
    assert len(set(keys)) == len(keys)


def test_tiles_have_names_of_their_sizes() -> None:
    for tile in mixed_tiles():
        split = f"s{tile.split}" if tile.split > 1 else ""
        assert tile.name == f"q{tile.rows}k{tile.k}{split}"


@pytest.mark.parametrize("shape", [(1, 64), (64,), (64, 1)])
def test_scales_of_rows_are_handed_over_as_one_group(shape: tuple[int, ...]) -> None:
    spec = GemmSpec(Int8Weight(64, 96, 0, "wgmma16"), Epilogue.parse("bias"))
    scale, bias = torch.rand(shape), torch.rand(64)
    read = operands_read(spec, [scale, bias], 3)
    assert read[0].shape == (1, 64)
    assert read[0].data_ptr() == scale.data_ptr()
    assert read[1].shape == (64,)


def test_scales_and_zero_points_of_groups_are_aligned_for_bulk_loads() -> None:
    n, k = 40, 256
    spec = GemmSpec(Int4(n, k, 64, "uint8", "wgmma16"))
    scale = torch.rand(4, n + 3).bfloat16()[:, 3:]
    zero = torch.randint(0, 17, (4, n), dtype=torch.uint8)
    for given, read in zip((scale, zero), operands_read(spec, [scale, zero], 3), strict=True):
        assert torch.equal(given, read)
        assert read.data_ptr() % 16 == 0
        assert read.stride(0) * read.itemsize % 16 == 0
    whole = torch.rand(4, 64).bfloat16()
    spec = GemmSpec(Int4(64, k, 64, "none", "wgmma16"))
    assert operands_read(spec, [whole], 3)[0].data_ptr() == whole.data_ptr()


def test_the_weight_and_what_belongs_to_it_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them may be read ahead of the kernel that writes them."""
    form = Int4(64, 128, 64, "uint8", "wgmma16")
    settled: list[Tensor] = []
    launched: list[Any] = []

    def launch(*tensors: Any) -> None:
        launched.append(tensors)

    class Device:
        def __init__(self, device: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *args: Any) -> None: ...

    class Fake:
        def launcher(self) -> Any:
            return launch

    monkeypatch.setattr(cutlass, "settle", settled.append)
    monkeypatch.setattr(cutlass, "choose_candidate", lambda problem: Fake())
    monkeypatch.setattr(cutlass.torch.cuda, "device", Device)
    x, scale = torch.rand(3, 128).bfloat16(), torch.rand(2, 64).bfloat16()
    zero = torch.zeros(2, 64, dtype=torch.uint8)
    w = torch.zeros(form.weight_shape(), dtype=torch.uint8)
    CutlassProvider().plan(mixed_problem(form, m=3))(x, w, [scale, zero], None)
    pointers = {tensor.data_ptr() for tensor in settled}
    assert pointers == {w.data_ptr(), scale.data_ptr(), zero.data_ptr()}
    [(_, codes, *_)] = launched
    assert codes.dtype == torch.int64
    assert codes.shape == (4, 2 * 64)
    assert torch.equal(codes, words(w))


def test_layout_follows_from_format_activations_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    int4, int8 = Int4(64, 128), Int8Weight(64, 128)
    monkeypatch.setattr(cutlass_mixed, "device_arch", lambda index: "sm_90a")
    assert kernel_layout(int4, None, cuda) == "wgmma16"
    assert kernel_layout(int4, E4M3, cuda) == "wgmma8"
    assert kernel_layout(int8, None, cuda) == "wgmma16"
    assert kernel_layout(int4, None, torch.device("cpu")) is None
    for other in (Dense(64, 128), BlockFp8(64, 128)):
        assert kernel_layout(other, E4M3, cuda) is None
    monkeypatch.setattr(cutlass_mixed, "device_arch", lambda index: "sm_80")
    assert kernel_layout(int4, None, cuda) is None
