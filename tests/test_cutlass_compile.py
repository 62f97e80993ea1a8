"""The CuTe DSL kernels compile for sm_90a without a GPU, to Tensor Core code without spills."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sass_products import touched_in_flight

from fusedops.config import DECODE_BUCKETS, DecodeTile, choose_decode, decode_tiles, m_bucket
from fusedops.epilogue.chain import Epilogue
from fusedops.errors import BuildError, ConfigError
from fusedops.jit.dsl import OBJECT, compile_dsl, dsl_kernel
from fusedops.jit.location import CacheSettings
from fusedops.jit.store import Store
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import NO_PROLOGUE, Prologue, RmsNormPrologue
from fusedops.providers.cutlass import CutlassProvider, decode_program
from fusedops.weight import Dense

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)


def make_problem(
    chain: str,
    m: int = 16,
    n: int = 4096,
    k: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    prologue: Prologue = NO_PROLOGUE,
    **changes: object,
) -> GemmProblem:
    epilogue = Epilogue.parse(chain)
    spec = GemmSpec(Dense(n, k), epilogue, epilogue.result_dtype(dtype), prologue)
    operand_dtypes = tuple(dtype if dtype in o.dtypes else torch.float32 for o in spec.operands)
    facts = {"device_type": "cuda", "sm_count": 132, "arch": "sm_90a", "gpu": "NVIDIA H200"}
    return GemmProblem(spec, m, dtype, operand_dtypes, **{**facts, **changes})  # type: ignore[arg-type]


def nvdisasm() -> str | None:
    """The disassembler of the nvidia-cuda-nvdisasm wheel, or one on PATH."""
    for root in map(Path, sys.path):
        for found in root.glob("nvidia/**/bin/nvdisasm"):
            return str(found)
    return shutil.which("nvdisasm")


@needs_dsl
@pytest.mark.parametrize(
    ("chain", "m", "dtype"),
    [
        ("residual|row_stat(sumsq,132)", 16, torch.bfloat16),
        ("bias|gate(silu)", 1, torch.float16),
        (
            "scale(x_scale,m)|scale(w_scale,n)|bias|act(gelu)|tap|quantize(e4m3,m)",
            64,
            torch.bfloat16,
        ),
        ("bias|residual|row_stat(sumsq,132)", 128, torch.bfloat16),
    ],
)
def test_decode_kernel_is_tensor_core_code_without_spills(
    chain: str, m: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    check_code(make_problem(chain, m, dtype=dtype), tmp_path)


@needs_dsl
@pytest.mark.parametrize("m", DECODE_BUCKETS)
def test_every_padded_m_compiles(m: int, tmp_path: Path) -> None:
    """CuTe DSL ends the process on some; K is split here, so each CTA owns half of the columns."""
    problem = make_problem("bias|residual", m)
    assert choose_decode(problem, "none").split == 2
    check_code(replace(problem, gpu="none"), tmp_path)


@needs_dsl
@pytest.mark.parametrize("tile", decode_tiles(), ids=lambda tile: tile.name)
def test_every_decode_tiling_compiles_without_a_driver(tile: DecodeTile, tmp_path: Path) -> None:
    problem = make_problem("none", n=128256)
    assert tile.legal(problem) is None
    compile_dsl(decode_program(problem, tile), problem.arch, tmp_path)
    assert (tmp_path / OBJECT).stat().st_size > 0


@needs_dsl
@pytest.mark.parametrize(
    ("prologue", "m", "packed"),
    [(RmsNormPrologue(1e-5), 9, True), (RmsNormPrologue(1e-6, "gemma", 1.0), 32, False)],
    ids=["llama", "gemma"],
)
def test_norm_inside_is_vectorised_and_keeps_the_kernel_free_of_spills(
    prologue: RmsNormPrologue, m: int, packed: bool, tmp_path: Path
) -> None:
    sass = check_code(make_problem("bias", m, prologue=prologue), tmp_path)
    # x is read from and written to shared memory 16 bytes at a time.
    assert "LDS.128" in sass
    assert "STS.128" in sass
    assert ("HMUL2.BF16" in sass) == packed


def check_code(problem: GemmProblem, folder: Path) -> str:
    """Compile what is chosen for a problem; its SASS is Tensor Core code without spills."""
    program = decode_program(problem, choose_decode(problem, problem.gpu))
    compile_dsl(program, "sm_90a", folder)
    cubin = extract_cubin((folder / OBJECT).read_bytes(), folder)
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "HGMMA" in sass
    assert "UTMALDG" in sass
    assert not re.search(r"\b(LDL|STL)\b", sass), "the kernel spills to local memory"
    assert touched_in_flight(sass) == []
    return sass


def test_norm_inside_is_refused_where_it_cannot_or_should_not_run() -> None:
    norm = RmsNormPrologue(1e-5)

    def refusal(m: int, k: int = 4096, given: bool = True) -> str | None:
        problem = make_problem("none", m, k=k, prologue=norm)
        if not given:
            problem = replace(problem, operand_dtypes=(torch.bfloat16, None))
        return next(t for t in decode_tiles() if t.name == "r64k128s2").legal(problem)

    assert refusal(1) is None
    assert refusal(32) is None
    assert "normalise all of x" in str(refusal(33))
    assert "norm_sumsq" in str(refusal(1, given=False))
    assert "multiple of 8" in str(refusal(1, k=4100))
    assert "stages" in str(refusal(32, k=200000))


def test_weight_of_the_norm_takes_stages_of_the_ring() -> None:
    tile = next(t for t in decode_tiles() if t.name == "r48k128")
    bare, normed = make_problem("none"), make_problem("none", prologue=RmsNormPrologue(1e-5))
    assert tile.norm_bytes(bare) == 0
    assert tile.norm_bytes(normed) == 8192
    with_norm = tile.config(16, 2, tile.norm_bytes(normed))
    assert with_norm.stages < tile.config(16, 2).stages
    assert with_norm.norm_bytes == 8192


def extract_cubin(object_file: bytes, folder: Path) -> Path:
    """The device code inside an exported object file: the embedded ELF for machine 190 (CUDA)."""
    start = object_file.find(b"\x7fELF", 1)
    while start >= 0:
        if int.from_bytes(object_file[start + 18 : start + 20], "little") == 190:
            cubin = folder / "kernel.cubin"
            cubin.write_bytes(object_file[start:])
            return cubin
        start = object_file.find(b"\x7fELF", start + 1)
    raise AssertionError("no CUDA ELF in the object file")


@needs_dsl
def test_warm_process_loads_the_kernel_without_the_dsl(tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi_orcjit")
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_cutlass_compile import make_problem
from fusedops.config import choose_decode
from fusedops.jit.dsl import dsl_kernel
from fusedops.jit.store import default_store
from fusedops.providers.cutlass import decode_program
problem = make_problem("bias")
kernel = dsl_kernel(decode_program(problem, choose_decode(problem, problem.gpu)), "sm_90a")
x = torch.zeros(8, 8, dtype=torch.bfloat16)
try:
    kernel(x, x, x, (x[0],), 1)
except ValueError as error:
    assert "expected device_type=cuda" in str(error), error
print(sorted(default_store().counts), "cutlass" in sys.modules)
"""
    environment = {"FUSEDOPS_CACHE_DIR": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )
        for _ in range(2)
    ]
    assert outputs[0].stdout.strip() == "['compiled'] True", outputs[0].stderr
    assert outputs[1].stdout.strip() == "['disk'] False", outputs[1].stderr


@needs_dsl
def test_failing_trace_is_a_build_error(tmp_path: Path) -> None:
    problem = make_problem("bias")
    tile = decode_tiles()[0]
    program = decode_program(problem, tile)

    def broken() -> tuple[object, ...]:
        raise RuntimeError("line one\nthe reason")

    from dataclasses import replace

    store = Store(CacheSettings(tmp_path, ()))
    with pytest.raises(BuildError, match="the reason"):
        dsl_kernel(replace(program, arguments=broken), "sm_90a", store)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "runs on CUDA tensors"),
        ({"arch": "sm_80"}, "compiled for sm_90a"),
        ({"k": 0}, "needs K > 0"),
        ({"aligned_bytes": 8}, "multiples of 16 bytes"),
        ({"dtype": torch.float32}, "multiplies bfloat16, float16, float8_e4m3fn and int8"),
        ({"chain": "row_stat"}, "too few parts"),
    ],
)
def test_provider_says_why_it_cannot(changes: dict[str, object], reason: str) -> None:
    answer = CutlassProvider().supports(make_problem(**{"chain": "none", **changes}))  # type: ignore[arg-type]
    assert not answer.ok
    assert reason in answer.reason


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 14336), (128256, 4096), (1280, 8192), (48, 64), (8, 8)]
)
def test_choice_is_legal_and_deterministic(m: int, n: int, k: int) -> None:
    problem = make_problem("none", m, n, k)
    tile = choose_decode(problem, problem.gpu)
    assert tile.legal(problem) is None
    assert tile == choose_decode(make_problem("none", m, n, k), problem.gpu)
    assert tile.clusters(n, 132) * tile.split <= 132 * tile.resident
    config = tile.config(m, 2)
    assert config.stages >= 3
    stage = (config.rows + config.m_pad) * config.k * 2
    assert config.stages * stage < 227 * 1024


def test_names_are_unique_and_buckets_cover_m() -> None:
    names = [tile.name for tile in decode_tiles()]
    assert len(names) == len(set(names))
    assert [m_bucket(m) for m in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 48, 64]
    assert [m_bucket(m) for m in (65, 96, 97, 128)] == [80, 96, 112, 128]
    # Threads that add up a row's statistics share a warp evenly.
    for bucket in DECODE_BUCKETS:
        assert bucket > 32 or bucket & (bucket - 1) == 0
    assert DECODE_BUCKETS[-1] == 128
    with pytest.raises(ConfigError, match="at most 128"):
        m_bucket(129)


def test_explain_shows_the_decode_configuration() -> None:
    text = CutlassProvider().describe(make_problem("gate", n=28672))
    assert "M padded to 16" in text
    assert "clusters" in text
