"""Which sources a goal's figure depends on: all that its rows run, found or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusedops.bench import goals
from fusedops.bench.environment import source_files, source_hash
from fusedops.bench.goals import NO_PART_OF_A_FIGURE, Registered
from fusedops.bench.imports import imported_files
from fusedops.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

GEMM = (
    *("fusedops/cutlass/sm90_decode.py", "fusedops/cutlass/exchange.py", "fusedops/gemm.py"),
    *("fusedops/config/files.py", "fusedops/epilogue/chain.py", "fusedops/jit/dsl.py"),
    *("cutlass_configs/sm90.toml", "cutlass_configs/tuned/nvidia_h200.json"),
    *("fusedops/weight/dense.py", "fusedops/providers/cutlass_decode.py"),
)
"""Some of what every product depends on."""

TIMING = tuple(f"fusedops/bench/{name}.py" for name in ("timer", "runner", "data", "peers"))

NEEDED: dict[str, tuple[str, ...]] = {
    "cuda.rms_norm_small": (
        *GEMM,
        *(f"csrc/{name}.cu" for name in ("norm", "activation", "quantize", "rope_append")),
        *(f"fusedops/bench/goals/{name}.py" for name in ("cuda_visible", "cuda_norm")),
        *("fusedops/ops/activation.py", "fusedops/ops/rope_append.py", "fusedops/ops/norm.py"),
        *("fusedops/ops/fused_quantize.py", "fusedops/ops/quantize.py", "fusedops/bench/chain.py"),
    ),
    "cuda.host_us": (
        *("fusedops/bench/goals/cuda_compile.py", "fusedops/bench/cuda_programs.py"),
        *("fusedops/jit/nvrtc.py", "csrc/sampling.cu", "csrc/include/row.cuh"),
        *(f"fusedops/ops/{name}.py" for name in ("op", "reduce", "transpose")),
    ),
    "cuda.rms_norm_fp8": ("fusedops/ops/fused_quantize.py", "fusedops/ops/quantize.py"),
    "cuda.act_quant": ("fusedops/ops/activation.py", "fusedops/ops/fused_quantize.py"),
    "cuda.sampling": ("fusedops/ops/sampling.py", "csrc/sampling.cu"),
    "cuda.hist.skew": ("fusedops/ops/histogram.py", "csrc/histogram.cu"),
    "cuda.reduce.rows": ("fusedops/ops/reduce.py", "csrc/reduce.cu"),
    "cuda.transpose.odd_fp32": ("fusedops/ops/transpose.py", "csrc/transpose.cu"),
    "cuda.copy_over_torch_mul": ("fusedops/providers/cuda_copy.py", "csrc/copy.cu"),
    "gemm.cold_model_compile_s": ("fusedops/jit/prebuild.py", "fusedops/bench/precompile.py"),
    "gemm.warm_first_call_s": ("fusedops/__init__.py", "fusedops/nn/convert.py"),
    "gemm.large_m.fused_over_bare": ("fusedops/cutlass/sm90_prefill.py",),
    "gemm.quack.small_m": ("fusedops/bench/products.py",),
    "gemm.chain129.m1": ("fusedops/bench/ranking.py", "fusedops/bench/cublaslt.py"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_figure_depends_on_all_that_its_rows_run(name: str) -> None:
    found = set(goals.load_all()[name].files())
    assert set(NEEDED[name]) <= found
    assert all((ROOT / file).is_file() for file in found)


def test_every_goal_depends_on_its_module_its_kernels_and_how_it_is_timed() -> None:
    for name, registered in goals.load_all().items():
        found = set(registered.files())
        module = registered.function.__module__.replace(".", "/") + ".py"
        launch = f"fusedops/providers/{registered.provider}.py"
        assert {*TIMING, module, launch} <= found, name
        assert name.startswith("cuda.") or set(GEMM) <= found, name
        assert not name.startswith("cuda.") or "csrc/include/row.cuh" in found, name


def test_a_goal_does_not_depend_on_kernels_that_it_does_not_run() -> None:
    registered = goals.load_all()
    for name in ("cuda.rms_norm", "cuda.act_quant", "cuda.transpose.8192_fp32"):
        found = registered[name].files()
        assert not [file for file in found if file.startswith(("fusedops/cutlass", "cutlass_"))]
    assert "csrc/norm.cu" not in registered["cuda.argmax"].files()


def test_a_first_call_depends_on_all_that_the_package_imports() -> None:
    found = set(goals.load_all()["gemm.warm_first_call_s"].files())
    imported = imported_files(["fusedops"], ROOT, NO_PART_OF_A_FIGURE)
    assert len(imported) > 50
    assert {path.as_posix() for path in imported} <= found


# Imports and patterns


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package whose ``start`` needs b, c, d and e, but not f."""
    sources = {
        "start": "import torch\nimport fusedops.b\nfrom fusedops.pack import c\n",
        "b": "def f():\n    from fusedops.d import g\n    return g\n",
        "pack/__init__": "",
        "pack/c": "from fusedops import e, use\n",
        "d": "from fusedops.start import x\n",
        "e": "import fusedops\n",
        "f": "import fusedops.start\n",
        "__init__": "from fusedops import f\n",
    }
    for name, text in sources.items():
        path = tmp_path / "fusedops" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_imports_are_followed_into_functions_and_round_circles(project: Path) -> None:
    def names(*modules: str, leave_out: tuple[str, ...] = ()) -> set[str]:
        found = imported_files(modules, project, leave_out)
        return {path.as_posix().removeprefix("fusedops/").removesuffix(".py") for path in found}

    assert names("fusedops.start", leave_out=("fusedops",)) == {
        *("start", "b", "pack/__init__", "pack/c", "d", "e")
    }
    assert names("fusedops.start") >= {"__init__", "f"}
    assert names("fusedops.b", leave_out=("fusedops.d",)) == {"b"}
    assert names("torch", "test_goals") == set()
    with pytest.raises(ConfigError, match=r"no module fusedops\.none"):
        imported_files(["fusedops.none"], project)


def test_a_change_of_an_imported_module_is_seen(project: Path) -> None:
    before = imported_files(["fusedops.pack.c"], project)
    (project / "fusedops" / "pack" / "c.py").write_text("import fusedops.b  # and no longer e\n")
    after = imported_files(["fusedops.pack.c"], project)
    assert Path("fusedops/e.py") in before - after


def test_measured_choices_count_where_a_pattern_names_them(tmp_path: Path) -> None:
    for name in ("sm90.toml", "tuned/gpu.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert source_files(["."], tmp_path) == [Path("sm90.toml")]
    patterns = [".", "tuned/*.json"]
    assert source_files(patterns, tmp_path) == [Path("sm90.toml"), Path("tuned/gpu.json")]
    before = source_hash(patterns, tmp_path)
    (tmp_path / "tuned" / "gpu.json").write_text('{"config": "another"}')
    assert source_hash(patterns, tmp_path) != before
    with pytest.raises(ConfigError, match="no source file"):
        source_files(["none/*.json"], tmp_path)


def test_a_goal_of_another_package_depends_on_what_it_covers() -> None:
    registered = Registered(lambda run: None, "reference", ("csrc/norm.cu",))  # type: ignore[arg-type, return-value]
    assert registered.files() == ["csrc/norm.cu"]
