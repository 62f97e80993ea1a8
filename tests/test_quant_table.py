"""The table of quantized products: its rows, how it resumes, and what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusedops.bench import chain
from fusedops.bench.environment import Environment
from fusedops.bench.files import read_json
from fusedops.bench.goals import quant_notes
from fusedops.bench.measurement import Failed, Outcome, outcome_to_json, summarize
from fusedops.bench.products import Layer
from fusedops.bench.quant_products import QuantLayer
from fusedops.bench.quant_table import TableRow, main, markdown, measure_table, table_rows
from fusedops.bench.roofline import PUBLISHED_CEILINGS
from fusedops.bench.timer import Protocol
from fusedops.quant import SCHEMES

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
ENVIRONMENT = Environment("NVIDIA H200", "580.1", "cpu", "3.12", {"torch": "2.11"}, "abc", "t", "d")


@pytest.fixture(autouse=True)
def small_chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(chain, "MIN_WEIGHT_BYTES", 100_000)
    monkeypatch.setattr(chain, "STREAMED_BYTES", 1)
    monkeypatch.setattr(chain, "MIN_LAUNCHES", 4)
    limits = PUBLISHED_CEILINGS["NVIDIA H200"]
    monkeypatch.setattr(quant_notes, "row_ceilings", lambda device: limits)
    yield
    torch.set_num_threads(threads)


def layers(m: int, *schemes: str) -> tuple[QuantLayer, ...]:
    return tuple(QuantLayer(Layer(m, 256, 256), SCHEMES[name]) for name in schemes)


def test_every_scheme_has_a_row_at_every_m() -> None:
    found = {(made.layer.M, made.scheme.name) for row in table_rows() for made in row.layers}
    sizes = (1, 8, 32, 64, 128, 512, 1024, 4096)
    assert found == {(m, scheme) for m in sizes for scheme in SCHEMES}
    assert len({row.key for row in table_rows()}) == len(list(table_rows())) == 20 + 48


def test_rows_are_kept_and_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quant.json"
    rows = [
        TableRow("small m3", layers(3, "fp8", "int4")),
        TableRow("large m130 int8", layers(130, "int8")),
    ]
    where = {"device": "cpu", "protocol": QUICK, "provider": "reference", "rows": rows}
    ticks = iter((0.0, 2.0))
    cut = measure_table(path, ENVIRONMENT, deadline=1.0, clock=lambda: next(ticks), **where)  # type: ignore[arg-type]
    assert cut == 1
    assert list(read_json(path)["rows"]) == ["small m3"]
    assert measure_table(path, ENVIRONMENT, **where) == 0  # type: ignore[arg-type]
    stored = read_json(path)["rows"]
    assert {"fusedops fp8", "fusedops int4", "cuBLAS bf16"} <= set(stored["small m3"]["outcomes"])
    large = stored["large m130 int8"]["outcomes"]
    assert "median_us" in large["fusedops int8"]
    assert "median_us" in large["torch"]

    def not_again(*_: object) -> dict[str, Outcome]:
        raise AssertionError("it is recorded")

    monkeypatch.setattr(TableRow, "outcomes", not_again)
    assert measure_table(path, ENVIRONMENT, **where) == 0  # type: ignore[arg-type]


def test_the_table_shows_failures_and_floors() -> None:
    row = next(iter(table_rows()))
    times: dict[str, Outcome] = {
        "fusedops fp8": summarize([7.2], mode="cuda graph", launches=1, hot=False),
        "fusedops int4": Failed("wrong"),
        "cuBLAS bf16": summarize([13.0], mode="cuda graph", launches=1, hot=False),
    }
    outcomes = {name: outcome_to_json(outcome) for name, outcome in times.items()}
    text = markdown({row.key: {"outcomes": outcomes}}, "NVIDIA H200")
    assert "| o | 1 | fp8 | 7.2 | 3.6 | 50% | cuBLAS bf16 13.0 |" in text
    assert "| o | 1 | int4 | failed | 1.9 | - | cuBLAS bf16 13.0 |" in text
    assert "| o | 1 | int8 | - |" in text


def test_without_a_gpu_it_only_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["--reports", str(tmp_path)]) == 2
    assert "--list needs none" in capsys.readouterr().err
    assert main(["--list", "--reports", str(tmp_path)]) == 0
    assert "| product | M |" in capsys.readouterr().out
