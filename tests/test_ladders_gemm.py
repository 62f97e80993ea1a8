"""The ladder of products without a GPU: kernels, loads, problems, kinds of steps, findings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from ladder_results import ENVIRONMENT, LIMITS, timed, write_results
from torch import Tensor

from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Absent, Failed, Measurement
from fusedops.bench.roofline import Traffic
from fusedops.bench.timer import Protocol
from fusedops.errors import ShapeError, UnsupportedError
from fusedops.gemm import gemm
from fusedops.jit.nvrtc import CUBIN, CudaProgram, compile_program, program_key
from fusedops.jit.probe import PROBE
from fusedops.ladders import load_ladder
from fusedops.ladders.counters import Counters
from fusedops.ladders.gemm import LADDER, counting_program
from fusedops.ladders.gemm_findings import TILES, findings
from fusedops.ladders.gemm_problem import (
    BF16,
    BF16_FUSED,
    FLOAT32,
    expected,
    predicted_loads,
    product_problem,
)
from fusedops.ladders.lines import code_lines, python_lines, with_imports
from fusedops.ladders.model import Step
from fusedops.ladders.pages import html_page, markdown
from fusedops.ladders.report import ResultRow, derived, read_report
from fusedops.ladders.runner import Runner, Task, time_step
from fusedops.ladders.walls import Wall

STEPS = {step.id: step for step in LADDER.steps}
OWN = [step for step in LADDER.steps if step.kernels]
CPU = torch.device("cpu")
QUICK = Protocol(
    samples=1, min_samples=1, min_window_us=0.001, settle_rounds=1, settle_min_s=0, settle_max_s=0
)
needs_wheels = pytest.mark.skipif(
    program_key(PROBE, "sm_90a").missing_tools != (),
    reason='needs NVRTC and the CUDA headers: pip install "fusedops[cuda]"',
)
by_id = pytest.mark.parametrize("step", OWN, ids=lambda step: step.id)


def buffers_of(kind: str, m: int = 32, n: int = 48, k: int = 64) -> Buffers:
    return product_problem(kind, m, n, k).make(torch.Generator().manual_seed(0))


# Kernels


def _disassembler() -> str | None:
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    tools = [Path(place) / "cu13" / "bin" / "nvdisasm" for place in places or ()]
    return next((str(path) for path in tools if path.is_file()), shutil.which("nvdisasm"))


@cache
def sass(program: CudaProgram) -> str:
    """SASS of a program for sm_90a."""
    tool = _disassembler()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    with TemporaryDirectory() as folder:
        compile_program(program, "sm_90a", Path(folder))
        command = [tool, str(Path(folder) / CUBIN)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def has(text: str, instruction: str) -> bool:
    return re.search(rf"\s{instruction}\b", text) is not None


@needs_wheels
@by_id
def test_no_kernel_spills_and_only_its_instructions_are_there(step: Step) -> None:
    text = sass(step.kernels[0].program)
    assert not has(text, "LDL")
    assert not has(text, "STL")
    is_async = step.id in ("gemm.v5", "gemm.v6")
    assert has(text, r"LDGSTS\.E\.BYPASS\.128") == is_async
    assert has(text, r"LDG\.E(\.128)?") == (not is_async)
    is_tensor = step.id == "gemm.v6"
    assert has(text, r"HMMA\.16816\.F32\.BF16") == is_tensor
    assert has(text, r"LDSM\.16\.M88\.4") == is_tensor
    assert has(text, "FFMA") == (not is_tensor)
    # The vectors of shared memory that padding must not take apart.
    assert has(text, r"LDS\.128") == (step.id != "gemm.v1" and not is_tensor)


@needs_wheels
def test_a_micro_tile_takes_16_loads_for_256_multiply_adds() -> None:
    for name in ("gemm.v4", "gemm.v5"):
        text = sass(STEPS[name].kernels[0].program)
        assert len(re.findall(r"\sFFMA\b", text)) == 16 * len(re.findall(r"\sLDS\.128\b", text))
        assert len(re.findall(r"\sFFMA\b", text)) % 256 == 0


@needs_wheels
@by_id
def test_loads_are_counted_only_where_that_is_asked_for(step: Step) -> None:
    kernel = step.kernels[0]
    atomics = r"(RED|ATOM)G?\.E\.ADD\.64\.STRONG\.GPU"
    assert has(sass(counting_program(kernel)), atomics)
    assert not has(sass(kernel.program), atomics)


def test_a_product_that_is_no_whole_number_of_tiles_is_refused() -> None:
    for step in OWN:
        kind = step.kinds[0]
        for m, n, k in ((129, 256, 128), (256, 136, 128), (256, 256, 136)):
            if step.id == "gemm.v1" and m % 8 == 0 and n % 32 == 0:
                continue  # it takes any K
            with pytest.raises(ShapeError, match=r"this step takes multiples of \d+ x \d+ x \d+"):
                step.run(buffers_of(kind, m, n, k))


# Loads


def loaded(m: int, n: int, k: int, tile_m: int, tile_n: int) -> int:
    """Elements that blocks touch, each once a block, by listing them."""
    total = 0
    for top in range(0, m, tile_m):
        for left in range(0, n, tile_n):
            rows = {(row, i) for row in range(top, top + tile_m) for i in range(k)}
            columns = {(column, i) for column in range(left, left + tile_n) for i in range(k)}
            total += len(rows) + len(columns)
    return total


@pytest.mark.parametrize("tile", [(1, 1), (4, 4), (8, 8), (8, 4), (2, 16)])
def test_predicted_loads_are_what_blocks_touch(tile: tuple[int, int]) -> None:
    assert predicted_loads(16, 32, 5, *tile) == loaded(16, 32, 5, *tile)


def test_the_naive_kernel_takes_two_loads_a_multiply_add() -> None:
    assert predicted_loads(512, 512, 512, 1, 1) == 2 * 512**3
    assert predicted_loads(512, 512, 512, 128, 128) == 512**3 / 64


def test_tiles_of_the_prediction_are_those_of_the_kernels() -> None:
    assert list(TILES) == [step.id for step in OWN]
    for step in OWN[1:]:
        _, block = step.run.args  # type: ignore[attr-defined]
        assert (block.rows, block.columns) == TILES[step.id]


# Problems


def right(buffers: Buffers) -> Tensor:
    x, w, *bias = buffers.inputs
    return F.gelu(F.linear(x, w, *bias), approximate="tanh") if bias else F.linear(x, w)


@pytest.mark.parametrize("kind", [FLOAT32, BF16, BF16_FUSED])
def test_a_problem_accepts_the_product_and_nothing_near_it(kind: str) -> None:
    problem = product_problem(kind, 32, 48, 256)
    buffers = problem.make(torch.Generator().manual_seed(2))
    x, w, *bias = buffers.inputs
    result = right(buffers)
    check = STEPS["gemm.torch"].check_of(problem)
    assert check((result,), buffers) is None
    one_wrong = result.clone()
    one_wrong[7, 5] += 0.25
    assert "element (7, 5)" in str(check((one_wrong,), buffers))
    without_a_slab = right(Buffers((x[:, 16:], w[:, 16:], *bias)))
    assert check((without_a_slab,), buffers) is not None
    assert check((right(Buffers((x, w.flip(0), *bias))),), buffers) is not None
    other = torch.bfloat16 if kind == FLOAT32 else torch.float32
    assert "expected" in str(check((result.to(other),), buffers))


def test_products_of_rounded_inputs_are_no_float32_products() -> None:
    # TF32 keeps 10 bits of the fraction.
    problem = product_problem(FLOAT32, 32, 48, 256)
    buffers = problem.make(torch.Generator().manual_seed(2))
    mask = torch.tensor(-(2**13), dtype=torch.int32)
    rounded = [(t.view(torch.int32) & mask).view(torch.float32) for t in buffers.inputs]
    assert problem.check((F.linear(*rounded),), buffers) is not None


def test_the_fused_problem_takes_bias_and_the_tanh_formula_only() -> None:
    problem = product_problem(BF16_FUSED, 32, 48, 64)
    buffers = problem.make(torch.Generator().manual_seed(2))
    x, w, bias = buffers.inputs
    fused = gemm(x, w, "bias|act(gelu_tanh)", {"bias": bias})
    apart = F.gelu(gemm(x, w) + bias, approximate="tanh")  # type: ignore[operator]
    check_apart = STEPS["gemm.v7"].check_of(problem)
    assert STEPS["gemm.v8"].check_of(problem) is problem.check
    for check in (problem.check, check_apart):
        assert check((fused,), buffers) is None  # type: ignore[arg-type]
        for wrong in (F.gelu(F.linear(x, w)), F.relu(F.linear(x, w, bias)), F.linear(x, w, bias)):
            assert check((wrong,), buffers) is not None
    assert check_apart((apart,), buffers) is None


def test_every_rounding_has_its_part_in_the_tolerance() -> None:
    # Products of one element each, whose sum is exact: what is left are the roundings.
    generator = torch.Generator().manual_seed(3)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in ((128, 1), (128, 1), 128))
    inputs = (3 * x.bfloat16(), w.bfloat16(), bias.bfloat16())
    buffers = Buffers(inputs, (torch.empty(128, 128, dtype=torch.bfloat16),))
    product = inputs[0].float() @ inputs[1].t().float()
    fused = F.gelu(product + inputs[2].float(), approximate="tanh").bfloat16()
    apart = F.gelu(product.bfloat16() + inputs[2], approximate="tanh")
    used = {}
    for name, result in (("fused", fused), ("apart", apart)):
        for is_apart in (False, True):
            exact, bound = expected(BF16_FUSED, is_apart, buffers)
            used[name, is_apart] = float(((result.double() - exact).abs() / bound).max())
    # All is allowed that happens, and little more; what is rounded apart is no fused result.
    assert 0.8 < used["fused", False] <= 1
    assert 0.6 < used["apart", True] <= 1
    assert used["apart", False] > 1


def test_operations_and_bytes_of_a_problem() -> None:
    problem = product_problem(BF16_FUSED, 32, 48, 64)
    assert problem.operations == problem.traffic.flops == 2 * 32 * 48 * 64
    assert problem.traffic == Traffic(
        2.0 * (32 * 64 + 48 * 64 + 48), 2.0 * 32 * 48, problem.operations
    )
    assert product_problem(FLOAT32, 32, 48, 64).traffic.write_bytes == 4 * 32 * 48


def test_tf32_is_off_for_the_peer_alone() -> None:
    seen: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(torch.get_float32_matmul_precision())
            return func(*args, **(kwargs or {}))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with Spy():
            STEPS["gemm.torch"].run(buffers_of(FLOAT32))
        assert "highest" in seen
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


# Kinds of steps


def test_a_step_only_meets_problems_of_its_kind() -> None:
    names = {
        problem.kind: [step.id.removeprefix("gemm.") for step in LADDER.steps_on(problem.name)]
        for problem in LADDER.problems(LADDER.size)
    }
    assert names == {
        FLOAT32: ["torch", "v1", "v2_16", "v2_32", "v3", "v4", "v5", "triton"],
        BF16: ["torch", "v6", "v7", "triton"],
        BF16_FUSED: ["torch", "v7", "v8", "triton", "cutlass_emitter"],
    }


def test_the_recorded_step_is_a_row_and_never_runs() -> None:
    step = STEPS["gemm.cutlass_emitter"]
    outcome = time_step(Task(LADDER, product_problem(BF16_FUSED, 32, 32, 32), step), CPU, QUICK)
    assert outcome == Absent(step.recorded)
    assert re.search(r"recorded on [\d-]+ on an NVIDIA H200: 200 us .* 209 us", step.recorded)
    with pytest.raises(UnsupportedError, match=r"Run gemm\.v8 instead"):
        step.run(None)


def test_the_library_must_be_served_by_the_provider_of_the_step() -> None:
    problem = product_problem(BF16, 32, 32, 32)
    right_one = replace(STEPS["gemm.v7"], provider="reference")
    assert isinstance(time_step(Task(LADDER, problem, right_one), CPU, QUICK), Measurement)
    around = replace(right_one, run=lambda buffers: F.linear(*buffers.inputs))
    assert time_step(Task(LADDER, problem, around), CPU, QUICK) == Failed(
        "gemm was not served by the provider reference"
    )
    assert {STEPS[f"gemm.{name}"].provider for name in ("v7", "v8")} == {"cutlass"}


def test_triton_is_imported_by_the_step_that_needs_it() -> None:
    module = "fusedops.ladders.gemm_triton"
    assert find_spec(module) is not None
    if find_spec("triton") is None:
        with pytest.raises(ModuleNotFoundError, match="triton"):
            STEPS["gemm.triton"].run(buffers_of(BF16, 128, 128, 64))
    assert load_ladder("gemm") is LADDER  # which has been imported without it


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPU")
def test_without_triton_the_row_says_why() -> None:
    task = Task(LADDER, product_problem(BF16, 32, 32, 32), STEPS["gemm.triton"])
    outcome = time_step(task, CPU, QUICK)
    assert isinstance(outcome, Absent)
    assert outcome.reason


def test_readings_are_recorded_with_the_time(tmp_path: Path) -> None:
    step = replace(
        STEPS["gemm.torch"], readings=lambda device: {"loads": 3.0, "predicted_loads": 3.0}
    )
    wrong = replace(step, id="gemm.wrong", run=lambda buffers: buffers.inputs[0])
    ladder = replace(LADDER, steps=(step, wrong))
    problem = product_problem(FLOAT32, 32, 32, 32)
    runner = Runner(tmp_path, ENVIRONMENT, CPU, QUICK, read=None, limits=LIMITS)
    tasks = [Task(ladder, problem, each) for each in ladder.steps]
    rows = runner.run(tasks, lambda what, rows: None).ladders["gemm"][problem.name]
    assert rows["gemm.torch"].readings == {"loads": 3.0, "predicted_loads": 3.0}
    assert rows["gemm.torch"].flops_per_s == rows["gemm.torch"].operations_per_s
    assert isinstance(rows["gemm.wrong"].outcome, Failed)
    assert rows["gemm.wrong"].readings == {}


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        ({"fma_pipe_pct": 80.0, "load_units_pct": 70.0}, Wall.FMA_PIPE),
        ({"fma_pipe_pct": 20.0, "load_units_pct": 90.0}, Wall.LOAD_UNITS),
        ({"fma_pipe_pct": 50.0, "load_units_pct": 50.0}, Wall.LATENCY),
        # Sectors of a product cost turns of the load units, or nothing.
        ({"sectors": 9.0, "ideal_sectors": 2.0, "load_units_pct": 98.0}, Wall.LOAD_UNITS),
        ({"sectors": 9.0, "ideal_sectors": 2.0, "fma_pipe_pct": 61.0}, Wall.FMA_PIPE),
    ],
)
def test_a_busy_pipe_is_a_wall(counted: dict[str, float], expected: Wall) -> None:
    problem = product_problem(FLOAT32, 4096, 4096, 4096)
    counters = Counters("k", **counted)
    assert derived(problem, timed(5000.0), counters, LIMITS)["wall"] == expected.value


def test_float32_products_are_held_to_the_cuda_cores() -> None:
    flops = 2 * 4096**3
    for kind, peak, wall in ((FLOAT32, 70e12, Wall.FMA_PIPE), (BF16, 700e12, Wall.TENSOR_PIPE)):
        near_us = 1.1 * flops / peak * 1e6
        row = derived(product_problem(kind, 4096, 4096, 4096), timed(near_us), None, LIMITS)
        assert row["wall"] == wall.value
        assert row["of_ceiling"] == pytest.approx(1 / 1.111, rel=1e-3)


# Lines


def test_lines_of_code_are_without_comments_and_docstrings() -> None:
    text = '"""Doc,\n\ntwo lines."""\n\nimport os  # why\n\n# a comment\nx = (\n    1,\n)\n'
    text += 'def f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(text) == 1 + 3 + 1 + 2
    assert python_lines(["ladders/lines.py"]) > 30


def test_a_kernel_comes_with_what_it_imports_beside_it() -> None:
    found = with_imports("cutlass/sm90_prefill.py")
    assert {"cutlass/sm90_prefill.py", "cutlass/tile.py", "cutlass/raster.py"} <= set(found)
    assert "cutlass/sm90_decode.py" not in found
    assert all(name.startswith("cutlass/") for name in found)
    assert STEPS["gemm.v7"].lesson.lines == python_lines(found)


def test_lines_grow_from_the_call_to_the_library() -> None:
    lines = {name.removeprefix("gemm."): step.lesson.lines for name, step in STEPS.items()}
    assert lines["torch"] == 0 < lines["v1"] < lines["v2_16"] < lines["v4"] < lines["v6"]
    assert 0 < lines["triton"] < lines["v6"] < lines["v7"]


def test_sources_follow_the_python_files() -> None:
    step = STEPS["gemm.v7"]
    assert step.sources({}) != replace(step, modules=("cutlass/tile.py",)).sources({})
    assert step.sources({"torch": "1"}) != step.sources({"torch": "2"})
    own = STEPS["gemm.v1"]
    assert own.sources({"torch": "1"}) == own.sources({"torch": "2"})


# Findings


def rows_of(us: dict[str, float], counted: dict[str, float]) -> dict[str, dict[str, ResultRow]]:
    rows = {
        name: ResultRow(
            timed(value),
            readings={"loads": counted[name], "predicted_loads": 100.0} if name in counted else {},
        )
        for name, value in us.items()
    }
    return {"a product": rows}


def test_a_count_that_is_no_prediction_is_named() -> None:
    us = dict.fromkeys(TILES, 10.0)
    assert "Every count equals" in findings(rows_of(us, dict.fromkeys(TILES, 100.0)))[0].text
    off = {**dict.fromkeys(TILES, 100.0), "gemm.v3": 101.0}
    found = findings(rows_of(us, off))[0]
    assert "another than the prediction for gemm.v3." in found.text
    assert next(line for line in found.lines if line[0] == "gemm.v3")[3:5] == ("100", "101")
    assert "Nothing was counted yet" in findings({})[0].text


def test_the_answer_follows_the_times_and_the_lines() -> None:
    us = {"gemm.torch": 100.0, "gemm.v5": 400.0, "gemm.v6": 250.0, "gemm.v7": 98.0}
    answer = findings(rows_of({**us, "gemm.triton": 130.0}, {}))[1]
    assert "CUTLASS (CuTe DSL) is the fastest (gemm.v7, 99.0 us)" in answer.text
    assert "cuBLAS, a call comes within 10% of it with the fewest lines" in answer.text
    by_route = {line[1]: line for line in answer.lines}
    assert by_route["CUDA C++"][2] == "gemm.v6"
    assert by_route["CUDA C++"][4] == "0.40"
    assert by_route["cuBLAS, a call"][5] == "a call"
    assert by_route["Triton"][5] == str(STEPS["gemm.triton"].lesson.lines)
    slow = findings(rows_of({**us, "gemm.torch": 150.0}, {}))[1]
    assert "nothing within 10% of it takes fewer lines" in slow.text
    assert "No step has a time yet" in findings({})[1].text


def test_the_record_of_the_older_emitter_is_whole() -> None:
    record = findings({})[2]
    assert len(record.lines) == 13
    assert ("4096 x 4096 x 4096", "176", "209", "200", "1.04") in record.lines
    assert "60 to 75 CPU seconds of nvcc" in record.text


def test_the_page_shows_roof_rates_and_findings(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json")
    report = read_report(tmp_path / "r.json")
    page = html_page(report, ["gemm"])
    assert page.count("tensor cores 700 TFLOP/s") == 2
    assert page.count("CUDA cores 70 TFLOP/s") == 1
    assert "<td>34.0 TFLOP/s</td>" in page  # 2 * 4096^3 operations in 4.04 ms
    text = markdown(report, ["gemm"])
    for finding in findings(report.ladders["gemm"]):
        assert f"<h3>{finding.title}</h3>" in page
        assert f"### {finding.title}" in text
    assert "absent: not run here; recorded on" in text
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["ladders"]["gemm"].keys() == {
        problem.name for problem in LADDER.problems(LADDER.size)
    }
