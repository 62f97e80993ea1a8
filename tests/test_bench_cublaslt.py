"""The cuBLASLt binding as far as a machine without a GPU can judge it; ranking; peers."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusedops.bench import Absent, Buffers, Failed, cublaslt_abi, measurement, peers, ranking
from fusedops.bench.cublaslt import Algorithm, LtMatmul, _alignment, _pitch
from fusedops.bench.cublaslt_abi import HeuristicResult, MatmulAlgo, find_library
from fusedops.bench.peers import PEERS, Available, peer_status
from fusedops.bench.products import Layer, lt_fusion, make_layer_buffers, product_peers
from fusedops.bench.ranking import Ranked
from fusedops.errors import ConfigError, DeviceError, LaunchError, LayoutError, UnsupportedError

# Structures


def test_structures_have_the_sizes_and_offsets_of_the_c_header() -> None:
    assert ctypes.sizeof(MatmulAlgo) == 64
    assert ctypes.sizeof(HeuristicResult) == 96
    offsets = {name: getattr(HeuristicResult, name).offset for name, _ in HeuristicResult._fields_}
    assert offsets == {
        "algo": 0,
        "workspaceSize": 64,
        "state": 72,
        "wavesCount": 76,
        "reserved": 80,
    }


def test_an_algorithm_survives_as_bytes() -> None:
    algo = MatmulAlgo()
    algo.data[0], algo.data[7] = 0x0123456789ABCDEF, 42
    again = MatmulAlgo.from_buffer_copy(bytes(algo))
    assert list(again.data) == list(algo.data)
    assert len(bytes(algo)) == 64


def test_epilogues_are_sums_of_their_parts() -> None:
    values = cublaslt_abi.EPILOGUES
    assert values["bias|relu"] == values["bias"] | values["relu"]
    assert values["bias|gelu_tanh"] == values["bias"] | values["gelu_tanh"]
    assert values[""] == 1


def test_a_status_becomes_an_error_with_its_name() -> None:
    cublaslt_abi.checked(0, "cublasLtMatmul", "m=1")
    with pytest.raises(LaunchError, match=r"15 \(NOT_SUPPORTED\) for m=1"):
        cublaslt_abi.checked(15, "cublasLtMatmul", "m=1")


def test_the_library_is_looked_for_in_the_given_folders(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="CUDA build of torch"):
        find_library([tmp_path])
    (tmp_path / "libcublasLt.so.13").touch()
    assert find_library([tmp_path / "none", tmp_path]) == tmp_path / "libcublasLt.so.13"


@pytest.mark.parametrize(
    ("offset_bytes", "alignment"), [(0, 256), (16, 16), (2, 2), (64, 64), (128, 128)]
)
def test_the_alignment_is_that_of_the_address(offset_bytes: int, alignment: int) -> None:
    raw = torch.empty(2048, dtype=torch.uint8)
    start = -raw.data_ptr() % 512
    assert _alignment(raw[start + offset_bytes :]) == alignment


def test_the_pitch_is_the_row_stride() -> None:
    wide = torch.empty(6, 40)
    assert _pitch("x", wide[:, :10]) == 40
    assert _pitch("x", wide[:1, :10]) == 10
    with pytest.raises(LayoutError, match="stride 1"):
        _pitch("x", wide.t())


@pytest.mark.parametrize(
    ("error", "epilogue"), [(UnsupportedError, "silu"), (UnsupportedError, "bias|silu")]
)
def test_an_epilogue_that_cublaslt_lacks_is_refused(error: type[Exception], epilogue: str) -> None:
    x = torch.randn(2, 8).bfloat16()
    with pytest.raises(error, match="has no epilogue"):
        LtMatmul(x, x, torch.empty(2, 2).bfloat16(), epilogue)


def test_cpu_tensors_are_refused_before_any_library_is_loaded() -> None:
    x = torch.randn(2, 8).bfloat16()
    with pytest.raises(DeviceError, match="a CUDA device"):
        LtMatmul(x, x, torch.empty(2, 2).bfloat16())


# Ranking


def timed(us: float) -> measurement.Measurement:
    return measurement.summarize([us], mode="cuda graph", launches=32, hot=False)


def algorithms(count: int) -> list[Algorithm]:
    return [Algorithm(rank, bytes([rank]) * 64, 0) for rank in range(count)]


def test_the_fastest_right_algorithm_wins() -> None:
    outcomes = {"rank 0": timed(12.0), "rank 1": Failed("wrong"), "rank 2": timed(9.5)}
    best = ranking._pick(outcomes, algorithms(3), "m1 n1 k1")
    assert best == Ranked(algorithms(3)[2], median_us=9.5, first_us=12.0, candidates=2)


def test_no_right_algorithm_is_an_error_with_the_reasons() -> None:
    with pytest.raises(UnsupportedError, match=r"rank 0.*relative error"):
        ranking._pick({"rank 0": Failed("relative error 1")}, algorithms(1), "m1 n1 k1")


def test_a_ranking_survives_the_file(tmp_path: Path) -> None:
    ranked = Ranked(Algorithm(3, bytes(range(64)), 1 << 20), 8.5, 9.0, 8)
    path = tmp_path / "deep" / "cublaslt.json"
    ranking.write_cache(path, {"a": ranking.ranked_to_json(ranked)})
    ranking.write_cache(path, {"b": ranking.ranked_to_json(ranked)})
    stored = ranking.read_cache(path)
    assert set(stored) == {"a", "b"}
    assert ranking.ranked_from_json(stored["a"]) == ranked


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": {"blob": "00"}}'])
def test_a_damaged_cache_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cublaslt.json"
    path.write_text(text)
    assert ranking.ranked_from_json(ranking.read_cache(path).get("a")) is None


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    ranking.write_cache(tmp_path / "file" / "cublaslt.json", {"a": {}})
    ranking.write_cache(None, {"a": {}})
    assert ranking.read_cache(None) == {}


def test_the_cache_folder_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEDOPS_BENCH_CACHE", str(tmp_path))
    assert ranking.cache_path() == tmp_path / "cublaslt.json"
    monkeypatch.delenv("FUSEDOPS_BENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ranking.cache_path() == tmp_path / "fusedops" / "bench" / "cublaslt.json"


def test_the_reference_adds_before_it_activates() -> None:
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    bias, addend = torch.randn(5).bfloat16(), torch.randn(3, 5).bfloat16()
    found = ranking.reference_product(x, w, bias, addend, "bias|gelu_tanh")
    exact = x.double() @ w.double().T + addend.double() + bias.double()
    expected = F.gelu(exact, approximate="tanh").float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Layers


@pytest.mark.parametrize(
    ("options", "epilogue", "whole"),
    [
        ({}, "", True),
        ({"bias": True}, "bias", True),
        ({"bias": True, "residual": True}, "bias", True),
        ({"residual": True}, "", True),
        ({"activation": "relu", "bias": True}, "bias|relu", True),
        ({"activation": "gelu_tanh"}, "gelu_tanh", True),
        ({"activation": "gelu_tanh", "residual": True}, "gelu_tanh", False),
        ({"activation": "gelu", "bias": True}, "bias", False),
        ({"activation": "silu"}, "", False),
        ({"activation": "silu", "gated": True, "bias": True}, "bias", False),
    ],
)
def test_cublaslt_fuses_what_it_can(options: dict[str, Any], epilogue: str, whole: bool) -> None:
    fusion = lt_fusion(Layer(1, 8, 8, **options))
    assert fusion.epilogue == epilogue
    assert fusion.whole == whole
    assert fusion.epilogue in cublaslt_abi.EPILOGUES


def test_layer_buffers_hold_what_the_layer_needs() -> None:
    layer = Layer(4, 16, 8, bias=True, activation="silu", gated=True, residual=True)
    buffers = make_layer_buffers(layer, torch.Generator().manual_seed(0))
    assert [tuple(t.shape) for t in buffers.inputs] == [(4, 8), (16, 8), (16,), (4, 8)]
    assert [tuple(t.shape) for t in buffers.outputs] == [(4, 8)]


def test_the_torch_peer_computes_the_layer() -> None:
    layer = Layer(4, 16, 32, bias=True, activation="silu", gated=True, dtype=torch.float32)
    buffers = make_layer_buffers(layer, torch.Generator().manual_seed(0))
    (plain,) = [
        c
        for c in product_peers(layer, lambda results, b: None, quack_configs=0)
        if c.name == "torch"
    ]
    torch.testing.assert_close(plain.run(buffers), layer.reference(buffers).float())


# Peers


def test_every_peer_is_here_or_says_why_not() -> None:
    status = peer_status()
    assert tuple(status) == PEERS
    for name, state in status.items():
        assert isinstance(state, Available) or state.reason, name
    if not torch.cuda.is_available():
        assert status["flashinfer"] == Absent("torch sees no CUDA device")
        assert status["cublaslt"] == Absent("torch sees no CUDA device")
    assert isinstance(status["torch"], Available)


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown peer 'cudnn'"):
        peer_status(["cudnn"])


def failing_import(error: Exception) -> Any:
    def fail(name: str, package: str | None = None) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("no", name="quack"), "the package quack-kernels is not installed"),
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "import fails.*einops"),
        (OSError("libcudart.so.12 not found"), "OSError: libcudart"),
    ],
)
def test_the_reason_of_an_absence_is_exact(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(importlib, "import_module", failing_import(error))
    state = peers._import_peer("quack", "quack-kernels")
    assert isinstance(state, Absent)
    assert re.search(reason, state.reason)


def test_peers_of_norms_and_sums_that_are_here_are_right_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(4, 64, generator=generator) for _ in range(2))
    weight = torch.randn(64, generator=generator)

    def ran(contenders: list[Any], inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {c.name: c.run(Buffers(inputs)) for c in contenders if c.name == "torch"}

    def accept(results: tuple[torch.Tensor, ...], buffers: Buffers) -> str | None:
        return None

    added = x + residual
    expected = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-5) * weight
    found = ran(peers.add_rms_norm_peers(accept, 1e-5), (x, residual, weight))["torch"]
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[1], added)
    normed = ran(peers.rms_norm_peers(accept, 1e-5), (added, weight))["torch"]
    torch.testing.assert_close(normed, expected)
    gated = ran(peers.act_and_mul_peers(accept), (x,))["torch"]
    torch.testing.assert_close(gated, F.silu(x[:, :32]) * x[:, 32:])
    total = ran(peers.sum_peers(accept), (torch.arange(9, dtype=torch.int32),))["torch"]
    assert total.tolist() == [36]
    assert total.dtype == torch.int32


def test_importing_the_rig_imports_no_peer() -> None:
    code = (
        "import sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import fusedops.bench.layer_chain, fusedops.bench.roofline, fusedops.bench.goal_harness\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "fusedops" in loaded
    assert not {"flashinfer", "quack", "cuda", "triton", "rich", "matplotlib"} & loaded
