"""Kernels compiled ahead: which a model needs, the folder they go to, and what it serves."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nvrtc import needs_wheels

from fusedops.bench.cuda_programs import model_programs, rows_to_plan
from fusedops.bench.precompile import H200, layer_problem, program_of
from fusedops.bench.products import Layer
from fusedops.bench.tune_problems import decoder_layers
from fusedops.cli import main
from fusedops.cli.prebuild import model_config, model_problems, rows_to_ask
from fusedops.config.files import DECODE_BUCKETS, tuning_key, tuning_m
from fusedops.errors import ConfigError, KernelMissingError, LoadError, UnsupportedError
from fusedops.jit import prebuild as prebuilding
from fusedops.jit.dsl import (
    DslProgram,
    dsl_kernel,
    dsl_key,
    missing_wheels,
    require_compiler,
)
from fusedops.jit.launch import cuda_module
from fusedops.jit.location import CacheSettings
from fusedops.jit.nvrtc import CUBIN, CudaProgram, lowered_names
from fusedops.jit.prebuild import KernelPool, _ensure, key_of
from fusedops.jit.store import Store, default_store
from fusedops.ops.op import OPS
from fusedops.providers.cuda_base import view_of
from fusedops.providers.cuda_plan import Gpu
from fusedops.providers.cutlass import choose_candidate
from serving_demo.shapes import SHAPES

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def small_program(m: int = 16) -> DslProgram:
    return program_of(layer_problem(Layer(m, 256, 256), H200))


def killed_program(only_good_in: int) -> DslProgram:
    """Kills any process but the one with this id, as the system does where memory runs out."""
    if os.getpid() != only_good_in:
        os.kill(os.getpid(), signal.SIGKILL)
    return small_program()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder without weights."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return path


# Which kernels


def test_a_folder_and_a_name_give_a_models_sizes(folder: Path) -> None:
    assert model_config(str(folder)).intermediate_size == 512
    assert model_config("llama3-8b") is SHAPES["llama3-8b"].config


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        (None, ConfigError, "llama3-8b"),
        ("{", LoadError, r"config\.json"),
        ("[]", LoadError, "list"),
        ('{"model_type": "mamba"}', LoadError, "mamba"),
    ],
)
def test_what_is_no_model_is_named(
    tmp_path: Path, text: str | None, error: type[Exception], reason: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=reason):
        model_config(str(tmp_path))


@pytest.mark.parametrize("most", [1, 64, 65, 100, 8192])
def test_rows_end_at_the_most_of_one_prefill(most: int) -> None:
    rows = rows_to_ask(most)
    assert (rows[0], rows[-1]) == (1, most)
    assert rows[: min(most, 64)] == list(range(1, min(most, 64) + 1))


def test_both_sides_of_every_padded_m_are_asked() -> None:
    """Where the decode kernels, and the M that measured choices are filed under, change."""
    rows = rows_to_ask(8192)
    for end in DECODE_BUCKETS:
        assert {end, end + 1} <= set(rows)
    changes = {m for m in range(1, 8192) if tuning_m(m) != tuning_m(m + 1)}
    assert {*DECODE_BUCKETS} <= changes <= set(rows)
    assert {m + 1 for m in changes} <= set(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_count_between_those_asked_takes_another_kernel(shape: str) -> None:
    """The middle of each gap between rows that are asked, of every product of every model."""
    rows = [m for m in rows_to_ask(288) if m > 64]
    gaps = [(low, high) for low, high in itertools.pairwise(rows) if high > low + 1]
    assert [(low - 1, high) for low, high in gaps[:4]] == list(
        itertools.pairwise(bucket for bucket in DECODE_BUCKETS if bucket >= 64)
    )

    def tile(layer: Layer) -> str:
        program = program_of(layer_problem(layer, H200))
        return f"{program.family} {program.spec}"

    for low, high in gaps:
        at = [decoder_layers(SHAPES[shape].config, m, torch.bfloat16) for m in (low, high)]
        between = decoder_layers(SHAPES[shape].config, (low + high) // 2, torch.bfloat16)
        for name, layer in between.items():
            assert tile(layer) in {tile(layers[name]) for layers in at if name in layers}, (
                name,
                layer.M,
            )


def test_a_models_problems_are_filed_like_its_layers_calls() -> None:
    found = list(model_problems(SHAPES["llama3-8b"].config, H200, 1, torch.float16))
    assert [str(problem.spec.epilogue) for problem in found] == [
        *("none", "residual", "gate", "residual", "none")
    ]
    assert {problem.x_dtype for problem in found} == {torch.float16}
    assert tuning_key(found[2]) == "n28672 k4096 m8 float16 gated"
    assert all(choose_candidate(problem) for problem in found)


GPU = Gpu(H200.arch, H200.sm_count)


def planned(op: str, *args: Any) -> set[CudaProgram]:
    """What the provider would load for a call of an operation, of tensors on the CPU."""
    served = OPS[op]._implementations["cuda"][1].__self__  # type: ignore[attr-defined]
    tensors, options = served.split(*args)
    views = tuple(None if tensor is None else view_of(tensor) for tensor in tensors)
    return {launch.program for launch in served.call._plan(views, GPU, *options).launches}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["llama3.2-1b", "llama3-8b"])
def test_a_models_programs_hold_what_its_operations_load(shape: str, dtype: torch.dtype) -> None:
    """Calls as ``serving_demo`` makes them, at numbers of rows around every change of layout."""
    config = SHAPES[shape].config
    programs = set(model_programs(config, dtype, 8192, GPU))
    assert {program.file for program in programs} == {
        *("norm.cu", "activation.cu", "rope_append.cu"),
        *("embedding.cu", "sampling.cu", "reduce.cu", "attention_decode.cu"),
    }
    hidden, heads = config.hidden_size, config.n_heads + 2 * config.n_kv_heads
    weight = torch.empty(hidden, dtype=dtype)
    for rows in (1, 2, 15, 66, 67, 132, 133, 528, 1056, 1057, 4000):
        x = torch.empty(rows, hidden, dtype=dtype)
        assert planned("rms_norm", x, weight, 1e-5, 0.0, True) <= programs
        for op in ("fused_add_rms_norm", "fused_add_rms_norm_"):
            assert planned(op, x, x, weight, 1e-5, 0.0, True) <= programs
        gate_up = torch.empty(rows, 2 * config.intermediate_size, dtype=dtype)
        assert planned("act_and_mul", gate_up, "silu") <= programs
    for rows in (1, 7, 64):
        logits = torch.empty(rows, config.vocab_size, dtype=dtype)
        numbers, seeds = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        assert planned("greedy", logits) <= programs
        assert planned("sample", logits, numbers, seeds, numbers.int(), numbers) <= programs
        qkv = torch.empty(rows, heads, config.head_dim, dtype=dtype)
        q, k, v = qkv.split((config.n_heads, config.n_kv_heads, config.n_kv_heads), dim=1)
        places = torch.zeros(rows, dtype=torch.int32)
        cos_sin = torch.empty(9, config.head_dim)
        for op in ("rope", "rope_"):
            assert planned(op, q, k, places, cos_sin, "halves") <= programs
        for stored in (dtype, torch.float8_e4m3fn, torch.int8):
            cache = torch.empty(3, 16, config.n_kv_heads, config.head_dim, dtype=stored)
            paged = (cache, cache, places[:, None], places)
            scale = None if stored is dtype else torch.tensor(0.5)
            append = (k, v, *paged, places, scale, scale, "NHD")
            assert planned("append_paged_kv", *append) <= programs
            both = (q, k, v, places, cos_sin, *paged, scale, scale, "halves", "NHD")
            assert planned("rope_append_paged_kv_", *both) <= programs
    for rows, pages in itertools.product((1, 3, 8, 31, 64, 256), (1, 9, 63, 64, 512)):
        q = torch.empty(rows, config.n_heads, config.head_dim, dtype=dtype)
        table = torch.zeros(rows, pages, dtype=torch.int32)
        for stored in (dtype, torch.float8_e4m3fn, torch.int8):
            cache = torch.empty(3, 16, config.n_kv_heads, config.head_dim, dtype=stored)
            scale = None if stored is dtype else torch.tensor(0.5)
            step = (q, cache, cache, table, table[:, 0], None, scale, scale)
            for window in (0, 100):
                options = (1, 0.125, True, window, 0.0, "NHD")
                assert planned("paged_attention", *step, *options) <= programs
    table = torch.empty(50, hidden, dtype=dtype)
    for rows, kind in itertools.product((1, 3, 48, 49, 64, 133, 4000), (torch.int32, torch.int64)):
        ids = torch.zeros(rows, dtype=kind)
        for op in ("embedding", "embedding_sumsq"):
            assert planned(op, ids, table) <= programs


def test_rows_are_planned_one_by_one_as_far_as_layouts_change() -> None:
    assert rows_to_plan(5, GPU) == [1, 2, 3, 4, 5]
    assert rows_to_plan(8192, GPU) == [*range(1, 1058), 8192]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("llama3-8b", "--arch", "sm_80"), "--arch sm_80: accepted is sm_90a"),
        (("llama3-8b", "--dtype", "f32"), "--dtype f32"),
        (("no-such-model",), "no-such-model"),
    ],
)
def test_bad_input_compiles_nothing(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["prebuild", *arguments, "--out", str(out)]) == 2
    assert reason in capsys.readouterr().err
    assert not out.exists()


# The pool


def test_a_pool_needs_a_worker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        KernelPool("sm_90a", CacheSettings(tmp_path), workers=0)


def test_what_may_not_be_compiled_fails_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDOPS_COMPILE", "0")
    done = _ensure(small_program, "sm_90a", CacheSettings(tmp_path), False)
    assert (done.ok, done.origin) == (False, "failed")
    assert re.match(r"KernelMissingError: .*FUSEDOPS_COMPILE=0", done.reason, re.DOTALL)


def test_a_killed_compiler_is_a_build_error_that_names_the_kernel(tmp_path: Path) -> None:
    called: list[str] = []
    work = functools.partial(killed_program, os.getpid())
    with KernelPool("sm_90a", CacheSettings(tmp_path), workers=1) as pool:
        name = pool.submit(work)
        assert pool.submit(work) == name
        assert pool.kernels == 1
        pool.when_done(name, lambda: called.append(name))
        done = pool.result(name, work)
        assert pool.ready([name], 0)
    assert not done.ok
    kernel = dsl_key(small_program(), "sm_90a").describe()
    assert done.reason.startswith(f"BuildError: {kernel}: the compiler's process was killed")
    assert called == [name]


@needs_dsl
@needs_wheels
def test_prebuilt_kernels_are_used_where_compiling_is_forbidden(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The head and the look-up of tokens of a tiny model, so that few kernels are compiled."""
    overlay = tmp_path / "overlay"
    every = model_programs(model_config(str(folder)), torch.bfloat16, 1, GPU)
    embedding, other = [each for each in every if each.file == "embedding.cu"][:2]

    def head_only(config: Any, m: int, dtype: torch.dtype) -> dict[str, Layer]:
        return {"lm_head": Layer(m, config.vocab_size, config.hidden_size, dtype=dtype)}

    monkeypatch.setattr("fusedops.bench.tune_problems.decoder_layers", head_only)
    monkeypatch.setattr(
        "fusedops.bench.cuda_programs.model_programs", lambda *sizes: [embedding, other]
    )
    arguments = ["prebuild", str(folder), "--out", str(overlay), "--rows", "8", "--workers", "1"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert re.search(r"3 kernel\(s\) in .* 3 compiled, 0 there already, 0 failed", first)
    assert f"FUSEDOPS_OVERLAY={overlay}" in first.replace("\n", "")
    assert main(arguments) == 0
    assert "0 compiled, 3 there already" in capsys.readouterr().out

    program = program_of(layer_problem(Layer(5, 512, 256), H200))
    monkeypatch.setenv("FUSEDOPS_COMPILE", "0")
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.delenv("FUSEDOPS_OVERLAY", raising=False)
    with pytest.raises(KernelMissingError, match="fusedops prebuild"):
        dsl_kernel(program, H200.arch)
    with pytest.raises(KernelMissingError, match="fusedops prebuild"):
        cuda_module(embedding, H200.arch)
    monkeypatch.setenv("FUSEDOPS_OVERLAY", str(overlay))
    assert callable(dsl_kernel(program, H200.arch))
    (name,) = embedding.kernels
    assert cuda_module(embedding, H200.arch).kernel(name, ("pointer",)).name == name
    assert default_store().counts == {"overlay": 2}


def test_every_program_of_csrc_is_found_where_compiling_is_forbidden(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that only writes down what it was asked for."""

    def compile_fake(program: CudaProgram, arch: str, where: Path) -> dict[str, str]:
        (where / CUBIN).write_bytes(b"cubin")
        return {f"kernel {name}": name for name in program.kernels}

    monkeypatch.setattr(prebuilding, "compile_program", compile_fake)
    overlay = tmp_path / "overlay"
    programs = model_programs(model_config(str(folder)), torch.bfloat16, 300, GPU)
    for program in programs:
        assert _ensure(lambda p=program: p, GPU.arch, CacheSettings(overlay), True).ok
    monkeypatch.setenv("FUSEDOPS_COMPILE", "0")
    store = Store(CacheSettings(tmp_path / "empty", (overlay,)))
    for program in programs:
        entry = store.ensure(key_of(program, GPU.arch), lambda where: {})
        assert tuple(lowered_names(entry.info)) == program.kernels
    assert store.counts == {"overlay": len(programs)}
    other = CudaProgram(programs[0].file, ("fusedops::other",))
    with pytest.raises(KernelMissingError, match="fusedops prebuild"):
        store.ensure(key_of(other, GPU.arch), lambda where: {})


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ({"tvm_ffi", "tvm_ffi_orcjit", "cutlass"}, "apache-tvm-ffi, apache-tvm-ffi-orcjit, nvidia"),
        ({"tvm_ffi_orcjit", "cutlass"}, "apache-tvm-ffi-orcjit, nvidia-cutlass-dsl, which are"),
        ({"cutlass"}, "needs nvidia-cutlass-dsl, which is absent"),
    ],
)
def test_without_the_extra_every_missing_package_is_named_once_with_one_command(
    monkeypatch: pytest.MonkeyPatch, absent: set[str], words: str
) -> None:
    monkeypatch.setattr(
        "fusedops.jit.dsl.importlib.util.find_spec",
        lambda module: None if module in absent else object(),
    )
    with pytest.raises(UnsupportedError) as caught:
        require_compiler.__wrapped__()
    assert words in str(caught.value)
    assert str(caught.value).count("pip install") == 1
    assert "nvidia" not in missing_wheels(prebuilt=True)
