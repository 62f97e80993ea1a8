"""Report pages show losses, failures and absences; result files and oracles hold their word."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops.bench import Absent, Failed, oracles
from fusedops.bench.environment import Environment
from fusedops.bench.files import read_json, update_json, write_json, write_text
from fusedops.bench.measurement import summarize
from fusedops.bench.pages import Page, Row, markdown, read_page, write_page
from fusedops.errors import LoadError

ENVIRONMENT = Environment(
    gpu="NVIDIA H200",
    driver="580.1",
    cpu="a CPU",
    python="3.12.3",
    versions={"torch": "2.11.0+cu130"},
    commit="abc123",
    command="fusedops bench memory",
    date="2026-01-02T03:04:05+00:00",
    variables={"FLASHINFER_DISABLE_JIT": "1"},
)


def timed(*samples: float, hot: bool = False, notes: tuple[str, ...] = ()):
    return summarize(samples, mode="cuda graph", launches=64, hot=hot, notes=notes)


def page(*rows: Row) -> Page:
    return Page("Memory", ENVIRONMENT, rows, {"quack": "the package is | missing"}, ("A note.",))


WIN = Row("sum 2^28", "fusedops", timed(200.0, 200.0), 180.0, 8.56e8, "memory", ours=True)
PEER = Row("sum 2^28", "torch", timed(250.0, 250.0), 180.0, 8.56e8, "memory")
LOSS = Row("sum 2^10", "fusedops", timed(4.0, 5.0, notes=("cut short",)), None, 0.0, ours=True)
FAST_PEER = Row("sum 2^10", "cub", timed(2.0, 2.5, hot=True))
BROKEN = Row("sum 2^10", "torch", Failed("not the | sum"))
MISSING = Row("sum 2^10", "quack", Absent("not installed"))


def line(text: str, start: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith(start)]
    return found


def test_a_page_names_its_environment_and_absent_peers() -> None:
    text = markdown(page(WIN))
    assert "| FLASHINFER_DISABLE_JIT | 1 |" in text
    for fact in ("NVIDIA H200, driver 580.1", "abc123", "`fusedops bench memory`", "2.11.0+cu130"):
        assert fact in text
    assert "| quack | the package is \\| missing |" in text
    assert "A note." in text


def test_a_row_shows_time_spread_bandwidth_and_fraction_of_its_floor() -> None:
    row = line(markdown(page(WIN, PEER)), "| **fusedops**")
    assert row == "| **fusedops** | 200.00 | 0.0% | 4.28 | 90% | 1.25x | memory, cold |"


def test_losses_stay_and_are_called_so() -> None:
    text = markdown(page(LOSS, FAST_PEER))
    assert "0.50x (slower)" in line(text, "| **fusedops**")
    assert "| hot |" in line(text, "| cub")


def test_failed_and_absent_rows_stay_with_their_reasons() -> None:
    text = markdown(page(LOSS, BROKEN, MISSING))
    assert "failed: not the \\| sum" in line(text, "| torch")
    assert "absent: not installed" in line(text, "| quack | absent")
    # With no peer that has a time there is nothing to compare with.
    assert "x (slower)" not in text


def test_notes_of_rows_are_listed() -> None:
    assert "- sum 2^10, fusedops: cut short" in markdown(page(LOSS))


def test_every_line_of_a_table_has_as_many_cells() -> None:
    text = markdown(page(WIN, PEER, LOSS, BROKEN, MISSING))
    tables = [row.replace("\\|", "") for row in text.splitlines() if row.startswith("|")]
    for above, below in itertools.pairwise(tables):
        if below.startswith("| ---") or above.startswith("| ---"):
            assert above.count("|") == below.count("|")


def test_a_page_survives_its_json_with_raw_samples(tmp_path: Path) -> None:
    written = page(WIN, PEER, LOSS, FAST_PEER, BROKEN, MISSING)
    data, text = write_page(written, tmp_path / "new" / "folder", "memory")
    assert read_page(data) == written
    assert text.read_text() == markdown(written)
    assert json.loads(data.read_text())["rows"][0]["outcome"]["samples"] == [200.0, 200.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable report"),
        ("[]", "schema None"),
        ('{"schema": 99}', "schema 99; this version reads 1"),
        ('{"schema": 1, "title": "x"}', "incomplete report"),
        ('{"schema": 1, "rows": [{"problem": "p"}]}', "incomplete report"),
    ],
)
def test_foreign_or_damaged_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "page.json"
    path.write_text(text)
    with pytest.raises(LoadError, match=message):
        read_page(path)


def test_a_missing_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="not a readable report"):
        read_page(tmp_path / "none.json")


# Files


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"b": 1.5, "a": None},
        {"a": []},
        {"a": {}, "b": [{}]},
        {"rows": {'"x"': {"samples": [1.0, 2.0], "notes": ["tab\t"]}, "y": [[1], {"z": [True]}]}},
    ],
)
def test_json_is_laid_out_by_lines_without_changing_it(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    write_json(tmp_path / "a.json", data)
    assert read_json(tmp_path / "a.json") == data


def test_plain_values_share_a_line(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"rows": {"y": {"samples": [1, 2]}, "x": {"b": 1, "a": 2}}})
    assert (tmp_path / "a.json").read_text().splitlines() == [
        "{",
        ' "rows": {',
        '  "x": {"a": 2, "b": 1},',
        '  "y": {',
        '   "samples": [1, 2]',
        "  }",
        " }",
        "}",
    ]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _add(path: Path, number: int) -> None:
    for step in range(20):
        update_json(path, lambda data, key=f"{number}.{step}": data.update({key: 1}))


def test_processes_that_update_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(read_json(path)) == 80
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_holds_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(LoadError, match="expected a JSON object"):
        read_json(path)
    assert read_json(tmp_path / "none.json") == {}


# Oracles


def test_integers_are_exact_and_in_range() -> None:
    drawn = oracles.integers((500,), torch.bfloat16, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.bfloat16
    assert set(drawn.tolist()) == {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}


def test_bitwise_accepts_equal_tensors_only() -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert oracles.bitwise(one, one.clone()) is None
    other = one.clone()
    other[1, 0] = 3.5
    assert "element (1, 0) is 3.5, expected 3.0" in (oracles.bitwise(other, one) or "")
    assert "expected torch.float32" in (oracles.bitwise(one.double(), one) or "")
    assert "expected shape (1, 2)" in (oracles.bitwise(one, one[:1]) or "")
    assert oracles.bitwise(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_within_is_elementwise_and_never_accepts_nan() -> None:
    reference = torch.tensor([1.0, 100.0], dtype=torch.float64)
    result = torch.tensor([1.05, 101.0])
    assert oracles.within(result, reference, torch.tensor([0.1, 2.0])) is None
    assert "element (0,)" in (oracles.within(result, reference, torch.tensor([0.01, 2.0])) or "")
    assert oracles.within(torch.tensor([1.0, float("nan")]), reference, 1e9)


def test_our_error_may_be_twice_the_peers() -> None:
    reference = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    peer = (reference * 1.01).bfloat16()
    assert oracles.no_worse_than((reference * 1.015).bfloat16(), peer, reference) is None
    assert "2 x the peer's" in (
        oracles.no_worse_than((reference * 1.03).bfloat16(), peer, reference) or ""
    )
    assert oracles.no_worse_than(reference.bfloat16(), reference, reference) is None


def test_a_guarded_output_tells_unwritten_insides_and_written_outsides() -> None:
    inside, verdict = oracles.guarded((3, 5), torch.bfloat16, "cpu", pad=2)
    assert "15 elements of the output are NaN" in (verdict() or "")
    inside.fill_(1.0)
    assert verdict() is None
    inside.as_strided((1,), (1,), inside.storage_offset() + 5).fill_(2.0)
    assert "1 elements around the output were overwritten" in (verdict() or "")
