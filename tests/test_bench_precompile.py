"""Kernels that are compiled ahead are those that a launch asks for, each once."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusedops.bench.goals.gemm_layers import model_layers, set_rows
from fusedops.bench.goals.gemm_rows import Compiler
from fusedops.bench.precompile import (
    H200,
    Precompiled,
    layer_problem,
    main,
    missing_programs,
    precompile,
    program_of,
)
from fusedops.bench.products import MODELS, PRODUCTS, Layer
from fusedops.errors import ConfigError
from fusedops.jit.dsl import dsl_key
from fusedops.jit.location import CACHE_VARIABLE
from fusedops.providers import cutlass_decode, cutlass_prefill
from fusedops.providers.cutlass import choose_candidate


def test_kernels_are_compiled_once_before_the_first_row_that_is_measured() -> None:
    asked: list[list[Any]] = []

    def compile_all(problems: list[Any]) -> Precompiled:
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


def test_each_kernel_is_compiled_once_and_failures_are_named() -> None:
    layers = model_layers("llama3-8b")
    problems = [layer_problem(layer, H200) for layer in layers]
    wanted, present = missing_programs(problems)
    assert present == 0
    assert 0 < len(wanted) < len(problems)
    seen: list[str] = []

    def compile_one(problem: Any) -> str:
        seen.append(dsl_key(program_of(problem), problem.arch).digest)
        return "no room" if len(seen) == 1 else ""

    done = precompile(
        problems, 1, make_pool=lambda count: ThreadPoolExecutor(count), compile_one=compile_one
    )
    assert len(set(seen)) == len(seen) == len(wanted)
    assert done.compiled == len(wanted) - 1
    assert list(done.failed.values()) == ["no room"]


def test_problems_that_no_tiling_fits_are_left_to_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_tiling(problem: Any) -> Any:
        raise ConfigError("no tiling")

    monkeypatch.setattr("fusedops.bench.precompile.choose_candidate", no_tiling)
    assert precompile([layer_problem(Layer(16, 64, 64), H200)]) == Precompiled(0, 0)


@pytest.mark.parametrize(
    "arguments", [[], ["gemm.none*"], ["--model", "llama9"], ["gemm.small_m.*", "--cores", "9999"]]
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
    assert precompile([problem, problem], 1).compiled == 1
    again = precompile([problem])
    assert (again.compiled, again.present) == (0, 1)
