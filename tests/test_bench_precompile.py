"""Kernels that are compiled ahead are those that a launch asks for, each once."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cutlass_compile import make_problem

from fusedops.bench.goals.gemm_layers import model_layers, set_rows
from fusedops.bench.goals.gemm_rows import Compiler
from fusedops.bench.precompile import (
    H200,
    Precompiled,
    layer_problem,
    main,
    precompile,
    program_of,
    quantized_problem,
)
from fusedops.bench.products import MODELS, PRODUCTS, Layer, make_layer_buffers
from fusedops.errors import ConfigError
from fusedops.gemm import explain
from fusedops.jit.dsl import dsl_key
from fusedops.jit.location import CACHE_VARIABLE
from fusedops.jit.prebuild import Compiled, KernelPool, Work
from fusedops.nn import QuantLinear, quant_linear
from fusedops.providers import cutlass_decode, cutlass_prefill
from fusedops.providers.cutlass import choose_candidate
from fusedops.providers.cutlass_prefill import prefill_candidate
from fusedops.providers.kernel_tensors import written
from fusedops.quant import SCHEMES, as_scheme
from fusedops.weight import GroupedFormat


def test_kernels_are_compiled_once_before_the_first_row_that_is_measured() -> None:
    asked: list[list[Any]] = []

    def compile_all(problems: list[Any], arch: str) -> Precompiled:
        assert arch == "sm_90a"
        asked.append(problems)
        return Precompiled(0, 0)

    rows = set_rows([16, 64], ["llama3-8b"])
    compiler = Compiler(rows, compile_all, lambda device: H200)
    compiler.before(rows[3], "cpu")
    assert asked == []
    compiler.before(rows[3], "cuda")
    compiler.before(rows[4], "cuda")
    assert [[problem.m for problem in problems] for problems in asked] == [[16] * 2 + [64] * 5]


@pytest.mark.parametrize("m", [1, 64, 96, 4096])
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_precompiled_kernel_is_the_one_that_is_launched(
    m: int, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for module in (cutlass_decode, cutlass_prefill):
        monkeypatch.setattr(
            module, "dsl_kernel", lambda program, arch: asked.append(dsl_key(program, arch).digest)
        )
    problem = layer_problem(MODELS["llama3-8b"].layer(product, m), H200)
    choose_candidate(problem).launcher()
    assert asked == [dsl_key(program_of(problem), "sm_90a").digest]


@pytest.mark.parametrize("n", [8, 24, 4096, 4104])
@pytest.mark.parametrize("extra", ["", "|tap(t,e4m3)", "|tap|row_stat(sumsq,64)"])
def test_a_prefill_candidates_program_is_for_tensors_as_torch_allocates_them(
    n: int, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second kernel would be compiled at the first launch."""
    loaded: list[str] = []

    def load(program: Any, arch: str) -> Any:
        loaded.append(dsl_key(program, arch).digest)
        return lambda *arguments: None

    monkeypatch.setattr(cutlass_prefill, "dsl_kernel", load)
    problem = make_problem(f"bias{extra}|residual", 100, n, 64)
    candidate = prefill_candidate(problem)
    half = torch.bfloat16
    x, w, bias, residual = (
        torch.zeros(size, dtype=half) for size in ((100, 64), (n, 64), n, (100, n))
    )
    main, *others = (written(result, 100) for result in problem.spec.allocate(x))
    candidate.launcher()(x, w, main, (bias, residual), others)
    assert loaded == [dsl_key(candidate.program(), problem.arch).digest]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 2, 4, 12, 24, 4096])
def test_a_layers_problem_has_the_alignment_of_its_tensors(k: int, dtype: torch.dtype) -> None:
    layer = Layer(3, 16, k, dtype=dtype)
    x, w, *_ = layer.operands(make_layer_buffers(layer, torch.Generator()))
    assert layer_problem(layer, H200).aligned_bytes == explain(x, w).problem.aligned_bytes


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "layer",
    [
        Layer(3, 64, 256, bias=True, residual=True),
        Layer(16, 64, 256, activation="silu", gated=True),
        Layer(40, 64, 128, activation="gelu"),
    ],
    ids=["residual", "gated", "activated"],
)
def test_a_layers_quantized_problem_is_that_of_quant_linear(
    name: str, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    posed: list[Any] = []

    def explained(x: Any, w: Any, form: str, chain: str, given: Any, dtype: Any, _: Any) -> Any:
        operands = {n: t for n, t in given.items() if t is not None}
        posed.append(explain(x, w, chain, operands, weight=form, out_dtype=dtype).problem)
        return [x]

    monkeypatch.setattr(quant_linear, "run_gemm", explained)
    made = torch.empty(layer.N, layer.K).normal_().bfloat16()
    bias = torch.zeros(layer.N, dtype=torch.bfloat16) if layer.bias else None
    activation = layer.activation or None
    functions = {"gate": activation} if layer.gated else {"activation": activation}
    linear = QuantLinear.from_weights(made, bias, name, **functions)
    expected = quantized_problem(layer, as_scheme(name), H200)
    if isinstance(expected.spec.weight, GroupedFormat):
        linear.set_layout(expected.spec.weight.layout)
    x = torch.randn(layer.M, layer.K).bfloat16()
    linear(x, torch.zeros(layer.M, layer.N).bfloat16() if layer.residual else None)
    facts = ("device_type", "sm_count", "arch", "gpu")
    there = {fact: getattr(expected, fact) for fact in facts}
    assert [replace(problem, **there) for problem in posed] == [expected]


def test_the_command_compiles_a_schemes_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(problems: Any, *_: Any) -> Precompiled:
        asked.extend(problems)
        return Precompiled(0, 0)

    monkeypatch.setattr("fusedops.bench.precompile.precompile", noted)
    assert main(["--model", "llama3-8b", "--scheme", "int4"]) == 0
    assert {problem.spec.weight.spec_name for problem in asked} == {"int4"}
    assert main(["--model", "llama3-8b", "--scheme", "int3"]) == 2


def test_a_layer_that_kernels_cannot_load_has_no_program() -> None:
    with pytest.raises(ConfigError, match="must be multiples of 16 bytes, got multiples of 8"):
        program_of(layer_problem(Layer(16, 64, 4 * 63), H200))


class FakePool(KernelPool):
    """Compiles nothing; kernels end as given in turn, then as compiled. Nothing is on disk."""

    def __init__(self, ends: Sequence[str | Exception], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ends = list(ends)
        self.started: list[str] = []

    def _start(self, work: Work) -> Future[Compiled]:
        self.started.append(dsl_key(work(), self.arch).digest)
        end = self._ends.pop(0) if self._ends else ""
        future: Future[Compiled] = Future()
        if isinstance(end, Exception):
            future.set_exception(end)
        else:
            future.set_result(Compiled("failed" if end else "compiled", end))
        return future

    def _compile_alone(self, work: Work) -> Compiled:
        return Compiled("compiled")


def test_each_kernel_is_compiled_once_and_failures_are_named() -> None:
    problems = [layer_problem(layer, H200) for layer in model_layers("llama3-8b")]
    pools: list[FakePool] = []

    def open_pool(*arguments: Any, **options: Any) -> FakePool:
        pools.append(FakePool(["no room", BrokenProcessPool("killed")], *arguments, **options))
        return pools[0]

    done = precompile(problems, "sm_90a", 1, open_pool=open_pool)
    started = pools[0].started
    assert 0 < len(started) < len(problems)
    assert set(started) == {dsl_key(program_of(problem), "sm_90a").digest for problem in problems}
    assert len(set(started)) == len(started)
    assert (done.compiled, done.present) == (len(started) - 1, 0)
    assert list(done.failed.values()) == ["no room"]


def test_problems_that_no_tiling_fits_are_left_to_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_tiling(problem: Any) -> Any:
        raise ConfigError("no tiling")

    monkeypatch.setattr("fusedops.bench.precompile.choose_candidate", no_tiling)
    done = precompile([layer_problem(Layer(16, 64, 64), H200)], "sm_90a")
    assert (done.compiled, done.present, done.failed) == (0, 0, {})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["gemm.none*"],
        ["--model", "llama9"],
        ["gemm.small_m.*", "--cores", "9999"],
        ["--model", "llama3-8b", "--workers", "0"],
    ],
)
def test_the_command_refuses_bad_input_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)
def test_a_new_process_compiles_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    problem = layer_problem(Layer(16, 4096, 4096, residual=True), H200)
    assert precompile([problem, problem], "sm_90a", 1).compiled == 1
    again = precompile([problem], "sm_90a")
    assert (again.compiled, again.present) == (0, 1)
