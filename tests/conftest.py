"""What every test shares: a kernel cache of the session's own, two threads at most, GPU marks."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

CACHE_VARIABLE = "FUSEDOPS_CACHE_DIR"
KEPT_CACHE_VARIABLE = "FUSEDOPS_TEST_CACHE_DIR"
HAS_GPU = torch.cuda.is_available()
GPU_TESTS = Path(__file__).parent / "gpu"

_session_cache = pytest.StashKey[Path]()
_not_run_gpu_tests = pytest.StashKey[int]()

# A shared machine's timing says nothing about the code, and a failure must come back in a rerun.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tests and give the session a kernel cache before anything looks for one.

    Without ``-m``, GPU tests are left out where there is no GPU, and those marked gpu_large
    everywhere. Workers of pytest-xdist inherit the cache of the process that starts them.
    """
    config.stash[_not_run_gpu_tests] = 0
    if not config.option.markexpr:
        config.option.markexpr = "not gpu_large" if HAS_GPU else "not gpu and not gpu_large"
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        return
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    kept = os.environ.get(KEPT_CACHE_VARIABLE)
    if kept:
        os.environ[CACHE_VARIABLE] = kept
        return
    folder = Path(tempfile.mkdtemp(prefix="fusedops-tests-"))
    config.stash[_session_cache] = folder
    os.environ[CACHE_VARIABLE] = str(folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's kernel cache."""
    folder = config.stash.get(_session_cache, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/gpu is a GPU test; without a GPU each is skipped by name."""
    for item in items:
        if GPU_TESTS in item.path.parents or item.get_closest_marker("gpu_large"):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the GPU tests that the session leaves out."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.config.stash[_not_run_gpu_tests] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's count to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        count = session.config.stash[_not_run_gpu_tests]
        session.config.workeroutput["not_run_gpu_tests"] = count


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Take over a worker's count; every worker collects the same tests."""
    output = getattr(node, "workeroutput", None) or {}
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    counted = max(config.stash[_not_run_gpu_tests], output.get("not_run_gpu_tests", 0))
    config.stash[_not_run_gpu_tests] = counted


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how many GPU tests did not run."""
    count = config.stash[_not_run_gpu_tests]
    if count:
        terminalreporter.write_line(
            f"{count} GPU test(s) were left out (-m {config.option.markexpr!r}); "
            "run them on a machine with an NVIDIA GPU"
        )
