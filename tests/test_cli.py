"""The command line: exit codes, one clear line for bad input, and what each command shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusedops
from fusedops.cli import main
from fusedops.cli.doctor import machine_status, registered_providers
from fusedops.cli.options import OptionError
from fusedops.jit.cache import entries
from fusedops.jit.key import KernelKey
from fusedops.jit.location import CacheSettings
from fusedops.jit.sources import Sources
from fusedops.jit.store import Store
from fusedops.ops.op import OPS
from fusedops.providers.base import PROVIDER_ORDER

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPU")

RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Runs a command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FUSEDOPS_DEBUG", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(folder))
    return folder


def store_kernel(spec: str, family: str = "test/family") -> Path:
    """Put a kernel of 2048 bytes into the cache; returns its folder."""

    def build(folder: Path) -> dict[str, str]:
        (folder / "kernel.cubin").write_bytes(bytes(2048))
        return {}

    key = KernelKey(family, spec, "sm_90a", Sources({"kernel.cu": "0" * 64}), {"tool": "1"})
    store = Store(CacheSettings.from_environment())
    return store.get(key, build, lambda entry: entry.folder)


def assert_one_error_line(code: int, out: str, err: str, *parts: str) -> None:
    """Bad input: exit code 2, and exactly one line, on stderr, that holds ``parts``."""
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    for part in parts:
        assert part in err


# The command itself


def test_version(cli: RunCommand) -> None:
    assert cli("--version") == (0, f"fusedops {fusedops.__version__}\n", "")


@pytest.mark.parametrize(
    "command", [(), ("doctor",), ("demo",), ("explain",), ("cache", "clear"), ("bench", "host")]
)
def test_help_names_the_command(cli: RunCommand, command: tuple[str, ...]) -> None:
    code, out, _ = cli(*command, "--help")
    assert code == 0
    assert " ".join(["fusedops", *command]) in out


def test_an_error_shows_its_traceback_on_request(
    cli: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDOPS_DEBUG", "1")
    with pytest.raises(OptionError, match="--dtype f7"):
        cli("explain", "1", "2", "3", "--dtype", "f7")


def test_an_error_of_the_system_is_one_line(
    cli: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr("fusedops.jit.cache.entries", refuse)
    assert_one_error_line(*cli("cache", "list"), "Permission denied", "somewhere")


def test_a_defect_is_not_hidden(cli: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("fusedops.jit.cache.entries", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli("cache", "list")


def test_ctrl_c_exits_with_130(cli: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fusedops.jit.cache.entries", interrupt)
    code, _, err = cli("cache", "list")
    assert code == 130
    assert "Traceback" not in err


def test_a_closed_pipe_ends_quietly(cache_dir: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(
        [sys.executable, "-m", "fusedops", "doctor"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert finished.returncode != 0
    assert "Traceback" not in finished.stderr
    assert "Exception ignored" not in finished.stderr


# doctor


def test_doctor_names_every_provider_and_operation(cli: RunCommand, cache_dir: Path) -> None:
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    for name in (*PROVIDER_ORDER, *OPS, "gemm", torch.__version__, str(cache_dir)):
        assert name in out
    assert not cache_dir.exists()


def test_doctor_knows_the_providers_of_each_operation() -> None:
    found = registered_providers()
    assert {"reference", "cublas"} <= set(found["gemm"])
    assert {"reference", "torch"} <= set(found["rms_norm"])
    assert all(set(providers) <= set(PROVIDER_ORDER) for providers in found.values())


@pytest.mark.parametrize("provider", PROVIDER_ORDER)
def test_every_provider_is_usable_or_says_why_not(provider: str) -> None:
    status = machine_status(provider)
    assert status.ok != bool(status.reason)


@needs_no_gpu
def test_without_a_gpu_only_the_reference_is_usable() -> None:
    assert [name for name in PROVIDER_ORDER if machine_status(name).ok] == ["reference"]


@pytest.mark.parametrize(
    ("capability", "usable"),
    [
        ((7, 5), {"cublas", "torch", "reference"}),
        ((8, 9), {"cutlass_sm80", "cuda", "flashinfer", "cublas", "torch", "reference"}),
        ((9, 0), set(PROVIDER_ORDER)),
        ((10, 0), set(PROVIDER_ORDER) - {"cutlass"}),
    ],
)
def test_a_provider_without_kernels_for_the_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], usable: set[str]
) -> None:
    monkeypatch.setattr("fusedops.cli.doctor.why_no_gpu", lambda: None)
    monkeypatch.setattr("fusedops.cli.doctor.has_module", lambda name: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    answers = {name: machine_status(name) for name in PROVIDER_ORDER}
    assert {name for name, answer in answers.items() if answer.ok} == usable
    shown = f"this GPU has {capability[0]}.{capability[1]}"
    assert all(shown in answer.reason for answer in answers.values() if not answer.ok)


def test_a_missing_module_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedops.cli.doctor.has_module", lambda name: name != "flashinfer")
    assert "extra `flashinfer`" in machine_status("flashinfer").reason


def test_doctor_survives_a_cache_that_cannot_be_trusted(cli: RunCommand, cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if "0777" in line]
    assert line.startswith("folder")
    assert "not usable" in line


@pytest.mark.parametrize(
    ("variable", "fact"),
    [("FUSEDOPS_CACHE_DIR", "folder"), ("FUSEDOPS_OVERLAY", "prebuilt folder")],
)
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_doctor_shows_a_folder_that_is_none_in_one_line(
    cli: RunCommand,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    fact: str,
    place: str,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / place))
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    assert re.search(rf"^{fact} +not usable: .*{tmp_path / place}.*{variable}", out, re.MULTILINE)


def test_doctor_shows_sound_overlays(
    cli: RunCommand, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FUSEDOPS_OVERLAY", raising=False)
    assert "none (FUSEDOPS_OVERLAY is not set)" in cli("doctor")[1]
    monkeypatch.setenv("FUSEDOPS_OVERLAY", f"{tmp_path}{os.pathsep}{tmp_path / 'none'}")
    out = cli("doctor")[1]
    assert re.search(rf"^prebuilt folder +{tmp_path}$", out, re.MULTILINE)
    assert re.search(rf"^prebuilt folder +not usable: .*{tmp_path / 'none'}", out, re.MULTILINE)


# explain


def test_explain_shows_provider_spec_and_reasons(cli: RunCommand) -> None:
    code, out, err = cli("explain", "4", "1536", "576", "--epilogue", "bias|act(silu)")
    assert (code, err) == (0, "")
    assert "M=4 N=1536 K=576" in out
    assert "bias|act(silu)" in out
    assert re.search(r"provider +reference", out)
    assert re.search(r"passed +cublas: ", out)


def test_explain_takes_a_prologue(cli: RunCommand) -> None:
    options = ("--prologue", "rms_norm(1e-05)", "--epilogue", "bias")
    code, out, err = cli("explain", "4", "1536", "576", *options)
    assert (code, err) == (0, "")
    assert "rms_norm(1e-05) > dense(1536,576) > bias > bf16" in out
    assert "reference: rms_norm(1e-05) ahead" in out


def test_explain_takes_dtypes_by_both_names(cli: RunCommand) -> None:
    short = cli("explain", "1", "16", "16", "--dtype", "f16", "--out-dtype", "f32")
    long = cli("explain", "1", "16", "16", "--dtype", "float16", "--out-dtype", "float32")
    assert short == long
    assert short[0] == 0
    assert "f32" in short[1]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--dtype", "f7"), "accepted are"),
        (("--out-dtype", "wide"), "--out-dtype wide: accepted are f32"),
        (("--device", "tpu"), "cpu, cuda and cuda:N"),
        (("--device", "cuda:x"), "cpu, cuda and cuda:N"),
        (("--device", "cuda:99"), "CUDA device"),
        (("--epilogue", "bias|nonsense"), "nonsense"),
        (("--epilogue", "bias||act(silu)"), "empty"),
        (("--epilogue", " "), "is blank; accepted: nodes joined"),
        (("--out-dtype", "int32"), "--out-dtype int32: accepted are f32"),
        (
            ("--prologue", "layer_norm"),
            "unknown prologue 'layer_norm'; accepted are none, rms_norm",
        ),
        (("--prologue", "rms_norm", "--dtype", "int8"), "the prologue rms_norm takes float32"),
    ],
)
def test_explain_refuses_bad_input(cli: RunCommand, options: tuple[str, ...], part: str) -> None:
    assert_one_error_line(*cli("explain", "4", "8", "16", *options), part)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (("0", "0", "0"), "M and N = 0, so the result is empty and nothing is launched"),
        (("0", "8", "16"), "M = 0, so the result is empty"),
        (("4", "0", "16"), "N = 0, so the result is empty"),
        (("4", "8", "0"), "K = 0: there is no product, and the epilogue runs on zeros"),
    ],
)
def test_explain_tells_what_becomes_of_a_shape_without_work(
    cli: RunCommand, shape: tuple[str, ...], part: str
) -> None:
    code, out, err = cli("explain", *shape, "--epilogue", "act(silu)")
    assert (code, err) == (0, "")
    assert part in out
    assert ("provider  none" in out) is ("empty" in part)
    assert cli("explain", *shape, "--epilogue", "nonsense")[0] == 2


@needs_no_gpu
def test_explain_names_a_wrong_chain_before_an_absent_gpu(cli: RunCommand) -> None:
    outcome = cli("explain", "4", "8", "16", "--epilogue", "nonsense", "--device", "cuda")
    assert_one_error_line(*outcome, "nonsense")


# cache


def test_cache_path(cli: RunCommand, cache_dir: Path) -> None:
    assert cli("cache", "path") == (0, f"{cache_dir}\n", "")


def test_cache_list_of_nothing(cli: RunCommand, cache_dir: Path) -> None:
    code, out, _ = cli("cache", "list")
    assert code == 0
    assert "0 kernel(s), 0 bytes" in out
    assert not cache_dir.exists()


def test_cache_list_shows_each_kernel(cli: RunCommand, cache_dir: Path) -> None:
    store_kernel("spec[one]")
    store_kernel("spec[two]", family="test/other")
    code, out, _ = cli("cache", "list")
    assert code == 0
    for part in ("spec[one]", "spec[two]", "test/other", "sm_90a", "2 kernel(s)"):
        assert part in out


def test_cache_verify_finds_damage_and_clear_removes_it(cli: RunCommand, cache_dir: Path) -> None:
    damaged = store_kernel("one")
    store_kernel("two")
    code, out, _ = cli("cache", "verify")
    assert (code, out) == (0, "2 kernel(s), all sound\n")
    (damaged / "kernel.cubin").write_bytes(bytes(100))
    code, out, _ = cli("cache", "verify")
    assert code == 1
    assert str(damaged) in out
    assert "1 of 2" in out
    code, out, _ = cli("cache", "clear", "--damaged")
    assert code == 0
    assert "removed 1 kernel(s)" in out
    assert [kernel.spec for kernel in entries()] == ["two"]
    assert cli("cache", "verify")[0] == 0


def test_cache_clear_takes_filters(cli: RunCommand, cache_dir: Path) -> None:
    store_kernel("one")
    store_kernel("two", family="test/other")
    assert "removed 0 kernel(s)" in cli("cache", "clear", "--older-than-days", "1")[1]
    assert "removed 0 kernel(s)" in cli("cache", "clear", "--leftovers")[1]
    code, out, _ = cli("cache", "clear", "--arch", "sm_80")
    assert "--arch sm_80: no stored kernel has it; there are: sm_90a" in out
    assert (code, "removed 0 kernel(s)" in out) == (0, True)
    assert "there are: test/family, test/other" in cli("cache", "clear", "--family", "nope")[1]
    assert "removed 1 kernel(s)" in cli("cache", "clear", "--family", "test/other")[1]
    assert [kernel.spec for kernel in entries()] == ["one"]
    assert "removed 1 kernel(s)" in cli("cache", "clear")[1]
    assert entries() == []


def test_cache_refuses_a_folder_that_others_can_write(cli: RunCommand, cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    assert_one_error_line(*cli("cache", "list"), str(cache_dir), "0777")


# demo


@pytest.fixture
def demo_options(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replaces the demo's runs by some that keep their options."""
    seen: list[object] = []

    def keep(options: object, _console: object) -> tuple[()]:
        seen.append(options)
        return ()

    monkeypatch.setattr("serving_demo.run.run_demo", keep)
    monkeypatch.setattr("serving_demo.step_bench.run_shapes", keep)
    return seen


def test_demo_hands_its_options_over(
    cli: RunCommand, demo_options: list[object], tmp_path: Path
) -> None:
    from serving_demo.options import DemoOptions

    code, _, err = cli(
        *("demo", "--prompt", "One", "--prompt", "Two", "--max-new-tokens", "7"),
        *("--model", str(tmp_path / "m.gguf"), "--device", "cpu", "--dtype", "float32"),
        *("--temperature", "0.5", "--seed", "3", "--no-compare"),
        *("--json", str(tmp_path / "out.json")),
    )
    assert (code, err) == (0, "")
    expected = DemoOptions(
        model=tmp_path / "m.gguf",
        prompts=("One", "Two"),
        max_new_tokens=7,
        device="cpu",
        dtype="float32",
        compare=False,
        json_path=tmp_path / "out.json",
        seed=3,
        temperature=0.5,
    )
    assert demo_options == [expected]


def test_demo_without_options_takes_the_demos_defaults(
    cli: RunCommand, demo_options: list[object]
) -> None:
    from serving_demo.options import DemoOptions

    assert cli("demo")[0] == 0
    assert demo_options == [DemoOptions()]


def test_demo_hands_the_options_of_a_shape_over(
    cli: RunCommand, demo_options: list[object], tmp_path: Path
) -> None:
    from serving_demo.step_bench import ShapeOptions

    code, _, err = cli(
        *("demo", "--shape", "qwen2.5-7b", "--batch", "1,8", "--batch", "32", "--context", "512"),
        *("--provider", "cutlass", "--attention", "torch", "--tensor-cores", "--replays", "9"),
        *("--seed", "3", "--json", str(tmp_path / "out.json")),
    )
    assert (code, err) == (0, "")
    assert cli("demo", "--shape", "llama3-8b")[0] == 0
    expected = ShapeOptions(
        "qwen2.5-7b",
        batches=(1, 8, 32),
        context=512,
        provider="cutlass",
        attention="torch",
        tensor_cores=True,
        replays=9,
        json_path=tmp_path / "out.json",
        seed=3,
    )
    assert demo_options == [expected, ShapeOptions("llama3-8b")]


@pytest.mark.parametrize(
    "options",
    [
        ("--prompt", "a"),
        ("--max-new-tokens", "1"),
        ("--model", "m.gguf"),
        ("--device", "cpu"),
        ("--dtype", "float32"),
        ("--temperature", "0"),
        ("--no-compare",),
    ],
)
def test_demo_refuses_a_models_options_with_a_shape(
    cli: RunCommand, demo_options: list[object], options: tuple[str, ...]
) -> None:
    outcome = cli("demo", "--shape", "llama3-8b", *options)
    flag = "--compare/--no-compare" if options == ("--no-compare",) else options[0]
    assert_one_error_line(*outcome, f"{flag}: not accepted with --shape")
    assert demo_options == []


@pytest.mark.parametrize(
    "options",
    [
        ("--batch", "1"),
        ("--context", "16"),
        ("--provider", "cublas"),
        ("--attention", "torch"),
        ("--tensor-cores",),
        ("--replays", "3"),
    ],
)
def test_demo_refuses_a_shapes_options_without_one(
    cli: RunCommand, demo_options: list[object], options: tuple[str, ...]
) -> None:
    assert_one_error_line(*cli("demo", *options), f"{options[0]}: accepted with --shape only")
    assert demo_options == []


def test_demo_names_a_missing_package(cli: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_gguf(_options: object, _console: object) -> None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr("serving_demo.run.run_demo", lacks_gguf)
    assert_one_error_line(*cli("demo"), "'gguf'", "extra `demo`")


def test_demo_refuses_an_unwritable_result_before_it_runs(cli: RunCommand, tmp_path: Path) -> None:
    missing = tmp_path / "absent" / "out.json"
    assert_one_error_line(*cli("demo", "--json", str(missing)), str(missing.parent))
    assert_one_error_line(*cli("demo", "--json", str(tmp_path)), "folder")


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "model.gguf"), (b"", "model.gguf"), (b"GGUF\x03\x00\x00\x00", "model.gguf")],
    ids=["missing", "empty", "truncated"],
)
def test_demo_refuses_a_bad_gguf(
    cli: RunCommand, tmp_path: Path, content: bytes | None, part: str
) -> None:
    model, result = tmp_path / "model.gguf", tmp_path / "out.json"
    if content is not None:
        model.write_bytes(content)
    outcome = cli("demo", "--device", "cpu", "--model", str(model), "--json", str(result))
    assert_one_error_line(*outcome, part)
    assert not result.exists()


def test_demo_refuses_an_unknown_architecture(cli: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert_one_error_line(*cli("demo", "--device", "cpu", "--model", str(tmp_path)), "unheard_of")


@needs_no_gpu
def test_demo_refuses_a_gpu_that_is_absent(cli: RunCommand) -> None:
    assert_one_error_line(*cli("demo", "--device", "cuda"), "cuda")


def test_demo_refuses_an_unknown_dtype(cli: RunCommand) -> None:
    assert_one_error_line(*cli("demo", "--device", "cpu", "--dtype", "f7"), "f7")
