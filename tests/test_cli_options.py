"""Options of every command: help states defaults and accepted values, bad values are one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from fusedops.bench.host import HostRow
from fusedops.bench.measurement import summarize
from fusedops.cli import app, main
from fusedops.cli.options import whole_numbers
from fusedops.errors import ConfigError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPU")


def commands() -> Iterator[tuple[str, Any]]:
    """(what is typed, command) of every command."""

    def below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield path, command
        for name, one in (inner or {}).items():
            yield from below(f"{path} {name}".strip(), one)

    yield from below("", typer.main.get_command(app))


COMMANDS = dict(commands())
REQUIRED = {
    "explain": ["1", "8", "8"],
    "prebuild": ["llama3-8b", "--out", "never-made"],
    "tune": ["--shape", "64,64"],
}
NUMBERS = [
    (command, option.opts[0], option.metavar)
    for command, known in COMMANDS.items()
    for option in known.params
    if option.opts[0].startswith("--") and option.metavar in ("N", "X")
]
CHOICES = [
    (command, option.opts[0], option.help)
    for command, known in COMMANDS.items()
    for option in known.params
    if option.metavar == "WORD"
]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr with which the command line refuses ``words``."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("error: ").rstrip("\n")


def test_the_lists_of_options_are_not_empty() -> None:
    assert {"demo", "bench host", "cache clear", "tune", "prebuild", "explain"} <= set(COMMANDS)
    assert len(NUMBERS) >= 12
    assert len(CHOICES) >= 9


# What is refused


@pytest.mark.parametrize(("command", "option", "kind"), NUMBERS)
def test_a_bad_number_names_option_value_and_range(
    capsys: pytest.CaptureFixture[str], command: str, option: str, kind: str
) -> None:
    words = [*command.split(), *REQUIRED.get(command, [])]
    what = "whole numbers" if kind == "N" else "numbers"
    bad = ["x", "", "nan", "1e999", "9" * 5000] + (["1.5", str(2**63)] if kind == "N" else ["-1"])
    for value in bad:
        line = refused(capsys, *words, option, value)
        named = value[:60] + "..." if len(value) > 60 else value or "''"
        assert line.startswith(f"{option} {named}: accepted are {what}")
        assert line.endswith(".")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("demo --max-new-tokens 0", "--max-new-tokens 0: accepted are whole numbers from 1."),
        ("demo --temperature -1", "--temperature -1: accepted are numbers from 0."),
        ("demo --temperature=-inf", "--temperature -inf: accepted are numbers from 0."),
        ("bench host --rounds -3", "--rounds -3: accepted are whole numbers from 1."),
        ("explain 1 x 3", "N x: accepted are whole numbers from 0."),
        ("explain 1 2.0 3", "N 2.0: accepted are whole numbers from 0."),
        (
            "demo --shape llama3-8b --batch 8,,1",
            "--batch 8,,1: accepted are whole numbers from 1, separated by commas, e.g. 1,8,64.",
        ),
    ],
)
def test_the_whole_line(capsys: pytest.CaptureFixture[str], words: str, line: str) -> None:
    assert refused(capsys, *words.split()) == line


@pytest.mark.parametrize(("command", "option", "help_text"), CHOICES)
def test_an_unknown_word_is_answered_with_the_accepted_ones(
    capsys: pytest.CaptureFixture[str], command: str, option: str, help_text: str
) -> None:
    words = [*command.split(), *REQUIRED.get(command, [])]
    line = refused(capsys, *words, option, "no such\nthing")
    assert line.startswith(f"{option} 'no such\\nthing': accepted ")
    accepted = line.rpartition(": accepted ")[2].removeprefix("are ").removeprefix("is ")
    assert accepted.rstrip(".") in help_text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("nonsense", ("fusedops: no such command", "Accepted are doctor, demo")),
        ("cache nonsense", ("fusedops cache: no such command", "Accepted are path, list")),
        ("doctor --nope", ("fusedops doctor: no such option: --nope", "Accepted are --help")),
        ("demo --promt x", ("no such option: --promt", "--no-compare, --shape")),
        ("explain 1 2", ("fusedops explain: missing argument 'K'", "Input features")),
        ("explain 1 2 3 4", ("unexpected extra argument", "Usage: fusedops explain")),
        ("explain -15 2 3", ("a negative number is not accepted here", "Usage: ")),
        ("prebuild llama3-8b", ("missing option '--out'", "The folder to fill")),
        ("demo --batch", ("'--batch' requires an argument", "whole numbers from 1")),
        ("demo --compare=yes", ("'--compare' does not take a value", "plain transformers")),
    ],
)
def test_wrong_usage_is_one_line_that_says_where_it_is_described(
    capsys: pytest.CaptureFixture[str], words: str, parts: tuple[str, ...]
) -> None:
    line = refused(capsys, *words.split())
    for part in parts:
        assert part in line
    assert "--help` tells more." in line


@pytest.mark.parametrize("words", [[], ["cache"], ["bench"]])
def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "Commands" in printed.out + printed.err
    assert "error" not in printed.err


def test_lists_of_numbers() -> None:
    assert whole_numbers("--m", "16, 64,1") == [16, 64, 1]
    with pytest.raises(ConfigError, match="--m 16,-1: accepted are whole numbers from 1"):
        whole_numbers("--m", "16,-1")


def test_a_value_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in refused(capsys, "demo", "--model", "a\x1b[2Jb", "--device", "cpu")


# Order: what is written wrong comes before what the machine lacks


@needs_no_gpu
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("tune --shape a,b", "--shape a,b: accepted are N,K"),
        ("tune --shape 64,64 --shape 0,8", "--shape 0,8"),
        ("tune --shape 64,64 --m 0", "--m 0"),
        ("tune --shape 64,64 --out {}", "is a folder; name another file with --out"),
        ("tune --shape 64,64 --out {}/none/x.json", "does not exist"),
        ("demo --shape llama3-8b --context 99999", "accepted are 1 to 8,177"),
    ],
)
def test_a_wrong_value_is_named_before_an_absent_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, part: str
) -> None:
    line = refused(capsys, *words.format(tmp_path).split())
    assert part in line
    assert "CUDA" not in line


def test_prebuild_names_its_own_option_for_a_bad_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, shared = tmp_path / "file", tmp_path / "shared"
    file.touch()
    shared.mkdir()
    shared.chmod(0o777)
    for out, part in (
        (file, "is a file; accepted is a folder"),
        (file / "below", f"{file} is a file"),
        (shared, "mode 0777"),
    ):
        line = refused(capsys, "prebuild", "llama3-8b", "--out", str(out))
        assert line.startswith(f"--out {out}: ")
        assert part in line
        assert "FUSEDOPS_CACHE_DIR" not in line


def test_prebuild_says_once_that_its_folder_cannot_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, mode: int) -> None:
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr("fusedops.cli.prebuild.require_compiler", lambda: None)
    monkeypatch.setattr("fusedops.cli.prebuild.make_dir", refuse)
    out = tmp_path / "out"
    line = refused(capsys, "prebuild", "llama3-8b", "--out", str(out))
    assert line.startswith(f"--out {out}: the folder cannot be made (Read-only file system)")


@pytest.mark.parametrize("model", ["meta-llama/Llama-3-8B", "{}"])
def test_prebuild_says_what_a_model_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    line = refused(capsys, "prebuild", model.format(tmp_path), "--out", str(tmp_path / "out"))
    assert "nothing is downloaded" in line
    assert "llama3-8b, llama3.2-1b" in line


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_states_each_default_and_what_is_accepted(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for option in COMMANDS[command].params:
        if option.opts[0] == "--help":
            continue
        name = option.opts[0] if option.opts[0].startswith("--") else option.metavar
        rows = [line for line in lines if f" {name} " in line]
        (row,) = [line for line in rows if "│" in line]
        flag = getattr(option, "is_flag", False) and not option.secondary_opts
        assert flag or "[default: " in row or "[required]" in row, row
        assert option.help, row
        if option.metavar == "N":
            assert "whole numbers" in option.help


# Files


def test_bench_ends_with_the_file_that_it_wrote(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = summarize([5.0], mode="cpu", launches=1, hot=True)
    rows = [HostRow("torch.ops.fusedops.gemm", 1, "float32", timed)]
    monkeypatch.setattr("fusedops.bench.host.measure_host", lambda *_: rows)
    path = tmp_path / "host.json"
    assert main(["bench", "host", "--json", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"file written: {path}"
    assert json.loads(path.read_text())["rows"]
    assert main(["bench", "host"]) == 0
    assert "file written" not in capsys.readouterr().out
