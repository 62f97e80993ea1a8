"""The small ladder without a GPU: figures and their pages, formulas, kernels, paths that lack."""

from __future__ import annotations

import ctypes
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ladder_results import timed, write_results
from test_ladders import Ids, disassembled, needs_wheels

from fusedops.bench.data import Buffers
from fusedops.bench.files import read_json, write_json
from fusedops.bench.measurement import Absent, Failed
from fusedops.errors import LoadError, UnsupportedError
from fusedops.ladders import load_ladder, small_calls, specified
from fusedops.ladders.counters import Counters
from fusedops.ladders.figure_plot import panel_svg
from fusedops.ladders.figures import Figure, FigureResult, FigureRow, Panel, outcome_row
from fusedops.ladders.pages import explain, html_page, markdown
from fusedops.ladders.report import read_report
from fusedops.ladders.small_attention import (
    DIM,
    RUNS,
    check_attention,
    hidden_constant,
    make_attention,
    materialised_terms,
    on_chip_elements,
    online_terms,
)
from fusedops.ladders.small_fusion import PAIRS, _check, split
from fusedops.ladders.small_host import chain_reference
from fusedops.ladders.small_memory import SAXPY_RUNS, check_saxpy, make_saxpy, sectors_a_request
from fusedops.ladders.small_warps import branch_reference, mix_reference, strided_sums
from fusedops.ladders.walls import Wall

SMALL = load_ladder("small")
FIGURES = {figure.id: figure for figure in SMALL.figures}
PANELS = [(figure, panel) for figure in SMALL.figures for panel in figure.panels]
NAMES = [f"{figure.id}: {panel.name}" for figure, panel in PANELS]


def made_up(panel: Panel) -> tuple[FigureRow, ...]:
    """Rows as a run would give them, with figures that no GPU gave."""
    rows = [
        FigureRow(series, str(at), at, dict.fromkeys(panel.columns, 3.0 * at + n))
        for n, series in enumerate(("first <b>", "second"))
        for at in (1, 4, 64)
    ]
    return (*rows, FigureRow("third", "8", absent="no | compiler"))


# Figures


def test_the_figures_are_what_is_specified() -> None:
    wanted = specified()["small"].steps
    assert {figure.id: figure.title for figure in SMALL.figures} == dict(wanted)
    assert SMALL.rungs == SMALL.figures
    assert SMALL.problems(SMALL.size) == ()


@pytest.mark.parametrize("figure", SMALL.figures, ids=lambda figure: figure.id)
def test_a_figure_explains_itself(figure: Figure) -> None:
    lesson = figure.lesson
    assert min(map(len, (lesson.idea, lesson.wall, lesson.lever))) > 40
    assert lesson.expected in Wall
    assert bool(figure.kernels) == (lesson.lines > 0)
    assert explain(SMALL).count(f"{figure.id}: {figure.title}") == 1
    names = [panel.name for panel in figure.panels]
    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize(("figure", "panel"), PANELS, ids=NAMES)
def test_a_panel_plots_columns_that_it_has(figure: Figure, panel: Panel) -> None:
    assert set(panel.y) <= set(panel.columns)
    assert not set(panel.counted) & set(panel.columns)
    # Counters are columns where there is something to count, and nowhere else.
    assert bool(panel.probes) == bool(panel.counted)


def test_a_figure_is_measured_again_for_other_files_or_versions() -> None:
    saxpy = FIGURES["small.saxpy"]
    assert saxpy.sources({"torch": "1"}) == saxpy.sources({"torch": "1"})
    assert saxpy.sources({"torch": "1"}) != saxpy.sources({"torch": "2"})
    other = replace(saxpy, kernels=FIGURES["small.coalescing"].kernels)
    assert saxpy.sources({}) != other.sources({})
    assert saxpy.modules == ("ladders/small_memory.py",)
    assert saxpy.sources({}) != replace(saxpy, modules=("ladders/small_host.py",)).sources({})


# Results


ROW = FigureRow("s", "4", 4.0, {"us": 2.5}, counters=Counters("k", sectors=8.0))


def test_rows_are_read_back_as_they_were_written() -> None:
    rows = (ROW, FigureRow("t", "-", absent="no g++"), FigureRow("t", "x", failed="wrong"))
    result = FigureResult({"p": rows}, "no ncu")
    again = FigureResult.from_json(json.loads(json.dumps(result.to_json())))
    assert again == result
    assert (again.failed, [row.key for row in again.rows]) == (1, ["s, 4", "t, -", "t, x"])
    with pytest.raises(LoadError, match="no row of a figure"):
        FigureResult.from_json({"panels": {"p": [{"what": 1}]}})


def test_an_outcome_becomes_a_row() -> None:
    def values(us: float) -> dict[str, float]:
        return {"us": us, "twice": 2 * us}

    right = outcome_row("s", "1", 1, timed(10.0), values)
    assert right.values["twice"] == 2 * right.values["us"] > 19
    assert outcome_row("s", "1", 1, Failed("wrong"), values).failed == "wrong"
    assert outcome_row("s", "1", 1, Absent("not here"), values).absent == "not here"


# Pages


def write_figures(path: Path) -> None:
    """Results of every ladder, and made-up rows in every figure."""
    write_results(path)
    data = read_json(path)
    data["figures"] = {
        figure.id: FigureResult(
            {panel.name: made_up(panel) for panel in figure.panels}, "ncu is <not> here"
        ).to_json()
        for figure in SMALL.figures
    }
    write_json(path, data)


def test_the_page_has_a_table_and_a_plot_of_every_panel(tmp_path: Path) -> None:
    write_figures(tmp_path / "r.json")
    page = html_page(read_report(tmp_path / "r.json"), ["small"])
    found = Ids(page)
    assert found.steps == list(FIGURES)
    assert (found.outside, found.open) == ([], [])
    assert "<b>" not in page
    assert page.count("<svg") == len(PANELS)
    for _, panel in PANELS:
        assert page.count(f"<h5>{panel.name}</h5>") >= 1
    assert page.count("<td>absent: no | compiler</td>") == len(PANELS)
    counted = sum(bool(panel.counted) for _, panel in PANELS)
    assert page.count("ncu is &lt;not&gt; here") == counted > 0


def test_markdown_has_every_panel_run_or_not(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json")
    empty = markdown(read_report(tmp_path / "r.json"), ["small"])
    write_figures(tmp_path / "r.json")
    full = markdown(read_report(tmp_path / "r.json"), ["small"])
    for figure, panel in PANELS:
        assert f"### {figure.id}: {panel.name}" in full
        assert f"| {panel.name} | not run |" in empty
    assert full.count("| third | 8 | absent: no \\| compiler |") == len(PANELS)


def test_a_plot_has_a_line_for_each_series_and_ticks_at_its_places() -> None:
    panel = FIGURES["small.divergence"].panels[0]
    svg = panel_svg(panel, made_up(panel))
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 6
    assert "first &lt;b&gt;" in svg
    spots = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', svg)[:3]]
    # 1, 4 and 64 on a logarithmic axis: the second gap is twice the first.
    assert (spots[2] - spots[1]) == pytest.approx(2 * (spots[1] - spots[0]), abs=0.3)


def test_a_plot_takes_zero_places_and_leaves_out_what_a_logarithm_has_not() -> None:
    panel = replace(FIGURES["small.fusion"].panels[0], log_y=True)
    rows = [
        FigureRow("g", "0", 0.0, {"apart us": 3.0, "fused us": 0.0}),
        FigureRow("g", "9", 9.0, {"apart us": 5.0, "fused us": 2.0}),
    ]
    svg = panel_svg(panel, rows)
    assert svg.count("<circle") == 3
    assert ">apart us<" in svg
    assert panel_svg(panel, [FigureRow("g", "-", absent="nothing")]) == ""


def test_names_on_the_axis_become_bars_whose_length_is_the_value() -> None:
    panel = FIGURES["small.calls"].panels[0]
    rows = [FigureRow(name, "call", None, {"us a call": us}) for name, us in (("a", 2), ("b", 8))]
    svg = panel_svg(panel, rows)
    short, long = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg))
    assert long == pytest.approx(4 * short, rel=0.01)
    assert ">a<" in svg


# Formulas and references


def test_sectors_of_a_strided_request() -> None:
    assert [sectors_a_request(stride) for stride in (1, 2, 4, 8, 16, 32)] == [4, 8, 16, 32, 32, 32]


def test_terms_of_attention_follow_the_formulas() -> None:
    assert materialised_terms(1000) == 1000 * DIM + 1000**2
    assert online_terms(2048, 64) == 2048**2 * DIM**2 / on_chip_elements(64)
    assert on_chip_elements(64) == 96 * (DIM + 1) + 64 * DIM


@pytest.mark.parametrize("name", RUNS)
def test_what_the_formula_of_attention_hides_is_its_limit(name: str) -> None:
    ratios = []
    for length in (4096, 1 << 20):
        # Elements of one head, as the kernels' counters find them.
        if name == "materialised":
            moved = 2 * length * DIM + 2 * (length // 64) * length * DIM + 4 * length**2
            ratios.append(moved / materialised_terms(length))
        else:
            rows = int(name.split()[1])
            moved = 2 * length * DIM + 2 * (length // rows) * length * DIM
            ratios.append(moved / online_terms(length, rows))
    limit = hidden_constant(name)
    assert abs(ratios[0] - limit) < 0.2
    assert ratios[1] == pytest.approx(limit, rel=1e-3)


def test_the_reference_of_attention_is_torchs() -> None:
    buffers = make_attention(64, torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(*buffers.inputs)
    assert check_attention((expected,), buffers) is None
    assert check_attention((expected + 0.01,), buffers) is not None
    assert {"materialised", "online, 16 rows"} <= RUNS.keys()


def test_the_reference_of_divergence_is_the_rounds_done_one_by_one() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(1))
    for by_warp in (0, 1):
        index = torch.arange(256) // (32 if by_warp else 1)
        value = x.double()
        for _ in range(256):
            value = value * (0.5 + index % 4 / 128.0).double() + 0.25
        torch.testing.assert_close(branch_reference(x, 4, by_warp), value)


def test_sums_of_threads_and_mixes_keep_the_total() -> None:
    x = torch.randn(48, 10, generator=torch.Generator().manual_seed(2))
    sums = strided_sums(x.flatten(), 64)
    assert float(sums.sum()) == pytest.approx(float(x.double().sum()))
    assert float(sums[7]) == pytest.approx(float(x.flatten()[7::64].double().sum()))
    ones = torch.ones(48, 3)
    torch.testing.assert_close(mix_reference(ones), torch.full((3,), 48.0, dtype=torch.float64))


def test_saxpys_check_sees_a_wrong_element() -> None:
    buffers = make_saxpy(1027, 1, torch.Generator().manual_seed(3))
    SAXPY_RUNS["torch"](buffers)
    assert check_saxpy(buffers.outputs, buffers) is None
    buffers.outputs[0][1026] += 1
    assert "element (1026,)" in str(check_saxpy(buffers.outputs, buffers))


def test_a_chain_of_steps_ends_near_two() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(4))
    assert torch.equal(chain_reference(x, 3), chain_reference(chain_reference(x, 1), 2))
    assert torch.allclose(chain_reference(x, 40), torch.full((64,), 2.0))


@pytest.mark.parametrize("pair", PAIRS[1:], ids=lambda pair: pair.name)
def test_a_fusions_two_ways_agree_and_a_wrong_one_is_seen(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fusedops.ladders.small_fusion.use_provider", lambda name: _Nothing(), raising=True
    )
    buffers = pair.make(3, torch.Generator().manual_seed(5))
    for way in (pair.fused, pair.apart):
        assert _check(pair, way(buffers), buffers) is None
    first, *rest = pair.apart(buffers)
    wrong = torch.zeros_like(first)
    assert "relative error" in str(_check(pair, (wrong, *rest), buffers))


class _Nothing:
    def __enter__(self) -> None:
        """Any provider serves the CPU."""

    def __exit__(self, *_: object) -> None:
        """Nothing was pinned."""


def test_the_gate_of_the_reference_is_the_models() -> None:
    pair = PAIRS[0]
    x, gate, up = (torch.randn(4, 8) for _ in range(3))
    buffers = Buffers((x, torch.cat((gate, up)), x))
    (result,) = pair.reference(buffers)
    torch.testing.assert_close(result, torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()))
    assert pair.saved_elements(2) == 2 * 2 * 2 * 4096


def test_a_difference_is_split_into_launch_and_the_rest() -> None:
    row = split(10.0, 15.0, 1.25, 4.0)
    assert row["saved us"] == 5.0
    assert (row["of it launch us"], row["of it traffic us"]) == (1.25, 3.75)
    assert row["traffic by bytes us"] == 4.0
    # A loss is no launch saved.
    loss = split(10.0, 9.0, 1.25, 4.0)
    assert (loss["saved us"], loss["of it launch us"], loss["of it traffic us"]) == (-1, 0, -1)


# Paths from Python to a kernel


@pytest.mark.parametrize(
    ("build", "missing"),
    [
        (small_calls.pybind_call, "nowhere and ninja not on the PATH"),
        (small_calls.tvm_ffi_call, "nowhere and ninja not on the PATH"),
    ],
)
def test_a_path_without_its_compiler_is_a_row_that_says_so(
    build: Any, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "nowhere")
    monkeypatch.setattr(small_calls, "_require_module", lambda *_: None)
    row = small_calls.path_row("path", build, torch.device("cpu"))
    assert (row.absent, row.failed, row.values) == (missing, "", {})


@pytest.mark.parametrize(
    ("build", "module", "package"),
    [
        (small_calls.tvm_ffi_call, "tvm_ffi", "apache-tvm-ffi"),
        (small_calls.cuda_core_call, "cuda.core", "cuda-core"),
    ],
)
def test_a_path_without_its_package_is_a_row_that_says_so(
    build: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = small_calls.importlib.util.find_spec
    monkeypatch.setattr(
        small_calls.importlib.util,
        "find_spec",
        lambda name: None if name == module else found(name),
    )
    row = small_calls.path_row("path", build, torch.device("cpu"))
    assert row.absent == f"the package {package} is not installed"


def test_a_path_that_breaks_or_is_wrong_is_a_failed_row() -> None:
    def broken(device: torch.device) -> Any:
        raise RuntimeError("ninja: build stopped\n\n  error: x")

    def wrong(device: torch.device) -> Any:
        return (lambda x: x.add_(1)), 0.5

    cpu = torch.device("cpu")
    assert small_calls.path_row("p", broken, cpu).failed == (
        "RuntimeError: ninja: build stopped error: x"
    )
    assert "expected" in small_calls.path_row("p", wrong, cpu).failed


def test_a_path_that_works_has_its_time_and_what_it_took_to_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def right(device: torch.device) -> Any:
        return (lambda x: x.mul_(0.5).add_(1)), 0.25

    row = small_calls.path_row("p", right, torch.device("cpu"))
    assert row.values["us a call"] > 0
    assert row.values["s to build"] == 0.25
    assert (
        "s to build"
        not in small_calls.path_row(
            "p", lambda device: (right(device)[0], None), torch.device("cpu")
        ).values
    )


def test_the_panel_has_a_row_for_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: torch.device) -> Any:
        raise UnsupportedError("not here")

    monkeypatch.setattr(small_calls, "PATHS", dict.fromkeys(small_calls.PATHS, absent))
    bench = SimpleNamespace(device=torch.device("cpu"))
    (panel,) = FIGURES["small.calls"].panels
    rows = list(panel.measure(bench))  # type: ignore[arg-type]
    assert [row.series for row in rows] == list(small_calls.PATHS)
    assert {row.absent for row in rows} == {"not here"}
    wanted = ("pybind11", "ctypes", "cuda.core", "tvm-ffi", "torch.library")
    assert all(any(word in row.series for row in rows) for word in wanted)


@pytest.mark.skipif(
    bool(small_calls.lacks_compiler()), reason="needs a C++ compiler and ninja on the PATH"
)
def test_the_compiled_path_launches_with_the_arguments_of_the_kernel(tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi")
    kinds = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    seen: list[tuple[Any, ...]] = []

    def launch(*values: Any) -> int:
        pointers = ctypes.cast(values[9], ctypes.POINTER(ctypes.c_void_p))
        address = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p))[0]
        numbers = [ctypes.cast(pointers[i], ctypes.POINTER(ctypes.c_int))[0] for i in (1, 2)]
        seen.append((*values[:9], address, *numbers))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(launch)
    x = torch.zeros(256)
    chain = small_calls.build_tvm_ffi(str(tmp_path))
    chain(x, ctypes.cast(callback, ctypes.c_void_p).value, 7, 9)
    assert seen == [(7, 1, 1, 1, 256, 1, 1, 0, 9, x.data_ptr(), 1, 256)]


# Kernels


@needs_wheels
def test_wide_accesses_are_wide_and_the_tail_is_there(tmp_path: Path) -> None:
    sass = disassembled("small_saxpy_vector", tmp_path)
    wide = sass[sass.index("small_saxpy_vector") :]
    assert "LDG.E.128" in wide
    assert "STG.E.128" in wide
    assert re.search(r"STG\.E(?!\.\d)", wide)


@needs_wheels
def test_paths_diverge_and_meet_again(tmp_path: Path) -> None:
    sass = disassembled("small_divergence", tmp_path)
    assert "BSSY" in sass
    assert "BSYNC" in sass
    assert "FFMA" in sass


@needs_wheels
@pytest.mark.parametrize("blocks", [1, 8])
def test_more_blocks_asked_for_make_registers_spill(blocks: int, tmp_path: Path) -> None:
    spills = re.search(r"\b(LDL|STL)\b", disassembled(f"small_registers<{blocks}>", tmp_path))
    assert bool(spills) == (blocks == 8)


@needs_wheels
def test_dependent_launch_and_clusters_are_in_the_kernels(tmp_path: Path) -> None:
    chain = disassembled("small_chain", tmp_path)
    assert "ACQBULK" in chain
    assert "PREEXIT" in chain
    (tmp_path / "c").mkdir()
    assert "UCGABAR_WAIT" in disassembled("small_cluster", tmp_path / "c")


@needs_wheels
def test_attention_keeps_its_rows_in_registers(tmp_path: Path) -> None:
    sass = disassembled("small_attention_online<128>", tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert "SHFL" in sass
