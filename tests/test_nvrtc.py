"""Compiling CUDA sources with NVRTC on a machine that has no GPU and no nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from store_worker import REPOSITORY, Worker

from fusedops.errors import BuildError, ConfigError
from fusedops.jit import nvrtc, resources
from fusedops.jit.nvrtc import (
    CUBIN,
    CudaProgram,
    compile_program,
    cuda_include_dir,
    lowered_names,
    program_key,
)
from fusedops.jit.probe import PROBE, compile_probe

ARCHES = ("sm_80", "sm_90a", "sm_100a")
HAS_WHEELS = program_key(PROBE, "sm_90a").missing_tools == ()
needs_wheels = pytest.mark.skipif(
    not HAS_WHEELS, reason='needs NVRTC and the CUDA headers: pip install "fusedops[cuda]"'
)
SITE_PACKAGES = Path(pytest.__file__).parent.parent


def nvdisasm() -> Path | None:
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    candidates = [Path(folder) / "cu13" / "bin" / "nvdisasm" for folder in folders or ()]
    on_path = shutil.which("nvdisasm")
    candidates += [Path(on_path)] if on_path else []
    return next((path for path in candidates if path.is_file()), None)


def package_files() -> dict[Path, int]:
    folders = [REPOSITORY / "fusedops", REPOSITORY / "csrc"]
    return {
        path: path.stat().st_mtime_ns
        for folder in folders
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    }


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc folder of the test's own, with the real headers."""
    root = tmp_path / "csrc"
    shutil.copytree(resources.csrc_dir(), root)
    monkeypatch.setattr(resources, "PACKAGE_DIR", tmp_path / "fusedops")
    return root


@pytest.fixture(scope="module", params=ARCHES)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, str]]:
    """The probe compiled for an architecture: (arch, cubin, mangled names)."""
    arch: str = request.param
    folder = tmp_path_factory.mktemp(arch)
    return arch, folder / CUBIN, lowered_names(compile_program(PROBE, arch, folder))


@needs_wheels
def test_the_probe_compiles_for_each_arch_without_a_gpu(
    compiled: tuple[str, Path, dict[str, str]],
) -> None:
    _, path, names = compiled
    cubin = path.read_bytes()
    assert set(names) == set(PROBE.kernels)
    assert cubin.startswith(b"\x7fELF")
    for mangled in names.values():
        assert mangled.startswith("_ZN8fusedops5scale")
        assert mangled.encode() in cubin
    assert len(set(names.values())) == len(PROBE.kernels)


@needs_wheels
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")
def test_the_cubin_is_for_the_arch_asked_for(compiled: tuple[str, Path, dict[str, str]]) -> None:
    arch, path, _ = compiled
    command = [str(nvdisasm()), str(path)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    targets = {line.split()[1] for line in sass.splitlines() if line.strip().startswith(".target")}
    assert targets == {arch}
    assert "LDG.E.128" in sass
    assert "STG.E.128" in sass
    assert "LDL" not in sass
    # griddepcontrol.wait and .launch_dependents, from Hopper on
    assert ("ACQBULK" in sass) is (arch != "sm_80")
    assert ("PREEXIT" in sass) is (arch != "sm_80")


@needs_wheels
def test_b58_compiling_writes_nothing_into_the_package(tmp_path: Path) -> None:
    before = package_files()
    assert len(before) > 10
    report = compile_probe("sm_90a")
    assert report.cubin_bytes > 1000
    assert report.compile_s > 0
    assert "headers" in report.compiler
    assert package_files() == before


@needs_wheels
def test_b62_the_second_start_compiles_nothing_whatever_the_seed_and_the_folder(
    tmp_path: Path,
) -> None:
    cache = {"FUSEDOPS_CACHE_DIR": str(tmp_path / "cache")}
    answers = []
    for number, more in enumerate(({}, {"FUSEDOPS_COMPILE": "0"})):
        cwd = tmp_path / f"folder{number}"
        cwd.mkdir()
        (cwd / "vec.cuh").write_text("#error the current folder is not searched\n")
        environment = {**cache, **more, "PYTHONHASHSEED": str(number)}
        with Worker(environment, cwd) as worker:
            answers.append(worker.ask("nvrtc", arch="sm_90a"))
    assert [answer.get("origin", answer) for answer in answers] == ["compiled", "disk"]
    assert answers[0]["name"] == answers[1]["name"] == program_key(PROBE, "sm_90a").name


def test_the_key_follows_the_source_and_every_include(csrc: Path) -> None:
    original = program_key(PROBE, "sm_90a")
    assert original.memory_only == ""
    names = [name for name, _ in original.sources.files]
    assert names == ["include/convert.cuh", "include/pdl.cuh", "include/vec.cuh", "probe.cu"]
    keys = {original.digest, program_key(PROBE, "sm_80").digest}
    for name in names:
        path = csrc / name
        text = path.read_text()
        path.write_text(text + "// changed\n")
        keys.add(program_key(PROBE, "sm_90a").digest)
        path.write_text(text)
    programs = [
        CudaProgram("probe.cu", PROBE.kernels[:1]),
        CudaProgram("probe.cu", PROBE.kernels, (("WIDTH", "8"),)),
        CudaProgram("probe.cu", PROBE.kernels, max_registers=64),
        CudaProgram("probe.cu", PROBE.kernels, fast_math=True),
    ]
    keys |= {program_key(program, "sm_90a").digest for program in programs}
    assert len(keys) == 2 + len(names) + len(programs)
    assert program_key(PROBE, "sm_90a") == original
    assert str(csrc.parent) not in str(original.fields)


@needs_wheels
def test_defines_and_options_reach_the_compiler(csrc: Path, tmp_path: Path) -> None:
    (csrc / "options.cu").write_text(
        "#if WIDTH != 8\n#error WIDTH is not 8\n#endif\n"
        'extern "C" __global__ void divide(float* x) { *x = *x / x[1]; }\n'
    )
    cubins = []
    for fast_math in (False, True):
        program = CudaProgram("options.cu", ("divide",), (("WIDTH", "8"),), 32, fast_math)
        assert lowered_names(compile_program(program, "sm_90a", tmp_path)) == {"divide": "divide"}
        cubins.append((tmp_path / CUBIN).read_bytes())
    assert len(cubins[1]) < len(cubins[0])
    with pytest.raises(BuildError, match="WIDTH is not 8"):
        compile_program(CudaProgram("options.cu", ("divide",)), "sm_90a", tmp_path)


@needs_wheels
def test_an_error_shows_the_last_lines_of_the_log(csrc: Path, tmp_path: Path) -> None:
    lines = [f"int broken_{i} = undefined_{i};" for i in range(30)]
    (csrc / "broken.cu").write_text("\n".join(lines) + "\n__global__ void k() {}\n")
    with pytest.raises(BuildError) as caught:
        compile_program(CudaProgram("broken.cu", ("k",)), "sm_90a", tmp_path)
    message = str(caught.value)
    assert "NVRTC cannot compile csrc/broken.cu for sm_90a" in message
    assert 'identifier "undefined_29" is undefined' in message
    assert "undefined_0 " not in message
    assert len(message.splitlines()) == 31
    assert "\0" not in message
    assert list(tmp_path.glob(CUBIN)) == []


@needs_wheels
@pytest.mark.parametrize("arch", ["sm_52", "sm_300"])
def test_an_arch_that_the_compiler_does_not_have_is_an_error(arch: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="gpu-architecture"):
        compile_program(PROBE, arch, tmp_path)


@needs_wheels
def test_a_kernel_that_is_not_in_the_source_is_an_error(tmp_path: Path) -> None:
    program = CudaProgram("probe.cu", ("fusedops::no_such_kernel<float>",))
    with pytest.raises(BuildError, match="no_such_kernel"):
        compile_program(program, "sm_90a", tmp_path)


def test_a_program_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="name at least one kernel"):
        CudaProgram("probe.cu", ())


@needs_wheels
def test_a_source_edited_while_it_is_compiled_is_not_taken(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.core import Program

    class Editing:
        def __init__(self, *args: object) -> None:
            self.program = Program(*args)
            (csrc / "include" / "vec.cuh").write_text("// edited\n")

        def compile(self, *args: object, **kwargs: object) -> object:
            shutil.copy(REPOSITORY / "csrc" / "include" / "vec.cuh", csrc / "vec.cuh")
            return self.program.compile(*args, **kwargs)

    monkeypatch.setattr("cuda.core.Program", Editing)
    with pytest.raises(BuildError, match="changed while it was being compiled"):
        compile_program(PROBE, "sm_90a", tmp_path)
    assert not (tmp_path / CUBIN).exists()


# --- missing wheels


def site_with(folder: Path, *names: str) -> dict[str, str | None]:
    """Environment of a Python that has only these of the installed packages."""
    for name in names:
        for source in SITE_PACKAGES.glob(name):
            target = folder / source.relative_to(SITE_PACKAGES)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    return {
        "PYTHONPATH": str(folder),
        "PATH": "",
        "CUDA_HOME": None,
        "CUDA_PATH": None,
        "LD_LIBRARY_PATH": None,
    }


CUDA_PYTHON = ("cuda", "cuda_*", "numpy", "numpy.libs")


@needs_wheels
@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ((), "cuda-core"),
        ((*CUDA_PYTHON, "nvidia/cu13/include"), "nvidia-cuda-nvrtc"),
        ((*CUDA_PYTHON, "nvidia/cu13/lib"), "nvidia-cuda-runtime"),
    ],
)
def test_b60_a_missing_wheel_is_named_and_prebuilt_kernels_still_serve(
    installed: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    if not (SITE_PACKAGES / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13").exists():
        pytest.skip("NVRTC does not come from a wheel of this environment")
    environment = site_with(tmp_path / "site", *installed)
    python = (sys.executable, "-S")
    cache = {"FUSEDOPS_CACHE_DIR": str(tmp_path / "cache")}
    with Worker({**environment, **cache}, python=python) as worker:
        answer = worker.ask("nvrtc", arch="sm_90a")
        assert answer["error"] == "BuildError", answer
        assert f"needs the package {named} " in answer["message"]
        assert 'pip install "fusedops[cuda]"' in answer["message"]
        with Worker({**os.environ, **cache}) as complete:
            assert complete.ask("nvrtc", arch="sm_90a")["origin"] == "compiled"
        answer = worker.ask("nvrtc", arch="sm_90a")
        assert (answer["origin"], answer["tools"]) == ("disk", {"nvrtc": None})


def test_the_headers_are_found_in_both_layouts_of_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "nvidia":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert cuda_include_dir() is None
    old = tmp_path / "nvidia" / "cuda_runtime" / "include"
    new = tmp_path / "nvidia" / "cu13" / "include"
    for folder in (old, new):
        folder.mkdir(parents=True)
        assert cuda_include_dir() != folder
        (folder / "cuda_bf16.h").write_text("")
        assert cuda_include_dir() == folder


def test_the_compilers_version_holds_that_of_the_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13070\n")
    monkeypatch.setattr(nvrtc, "cuda_include_dir", lambda: tmp_path)
    monkeypatch.setattr(nvrtc, "_has_cuda_core", lambda: True)
    monkeypatch.setattr(nvrtc, "distribution_versions", lambda name: {name: "13.7.1"})
    assert nvrtc._compiler_version.__wrapped__() == "13.7.1 headers 13070"
    monkeypatch.setattr(nvrtc, "cuda_include_dir", lambda: None)
    assert nvrtc._compiler_version.__wrapped__() is None
