"""What a kernel's key depends on, and what it must not depend on."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from store_worker import fake_key

import fusedops.epilogue
from fusedops.epilogue import Node
from fusedops.errors import BuildError, ConfigError
from fusedops.jit import sources
from fusedops.jit.key import KernelKey, distribution_versions, is_entry_name
from fusedops.jit.resources import PACKAGE_DIR, csrc_dir
from fusedops.jit.sources import Sources, cuda_sources, python_sources


class UserNode:
    """A node class of a user, in a file."""


class Subclass(Node):
    """A node class of a user on top of one of ours."""


# --- the key


def test_every_field_changes_the_key() -> None:
    keys = [
        fake_key("a"),
        fake_key("b"),
        fake_key("a", arch="sm_80"),
        fake_key("a", family="other"),
        fake_key("a", flags=("--use_fast_math",)),
        fake_key("a", flags=("-x", "-y")),
        fake_key("a", flags=("-y", "-x")),
        fake_key("a", toolchain={"fake": "2.0"}),
        fake_key("a", toolchain={"other": "1.0"}),
        fake_key("a", toolchain={"fake": None}),
        fake_key("a", sources=Sources((("fake.py", "00fe"),))),
    ]
    assert len({key.digest for key in keys}) == len(keys)
    assert len({key.name for key in keys}) == len(keys)
    assert all(is_entry_name(key.name) for key in keys)


def test_only_the_toolchain_leaves_the_source_digest_alone() -> None:
    one, other = fake_key("a"), fake_key("a", toolchain={"fake": "2.0"})
    assert one.source_digest == other.source_digest
    assert one != other
    assert one == fake_key("a")
    assert hash(one) == hash(fake_key("a"))
    assert fake_key("a", toolchain={"x": "1", "y": "2"}) == fake_key(
        "a", toolchain={"y": "2", "x": "1"}
    )


def test_the_key_does_not_change_unnoticed() -> None:
    # A change of this value throws away every stored and prebuilt kernel: raise _KEY_FORMAT.
    assert fake_key("a").name == "00aa609007f99e1f4d9435c103aad095.b4052b8f651e2c403cf0f5e6b811e7b6"


@pytest.mark.parametrize("arch", ["", "sm90", "sm_9", "sm_90b", "compute_90", "sm_90a ", "native"])
def test_an_arch_that_is_none_is_refused(arch: str) -> None:
    with pytest.raises(ConfigError, match="sm_90a"):
        fake_key("a", arch=arch)


def test_versions_of_absent_distributions_are_none() -> None:
    versions = distribution_versions("torch", "no-such-distribution")
    assert versions["no-such-distribution"] is None
    assert versions["torch"]
    key: KernelKey = fake_key("a", toolchain=versions)
    assert key.missing_tools == ("no-such-distribution",)


# --- Python sources


def write_package(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A package in ``folder``, written an hour ago, before this process started."""
    package = folder / name
    for file, text in files.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return package


FILES = {
    "__init__.py": "",
    "nodes.py": (
        "from .math import helper\n"
        "import json\n"
        "class Double:\n"
        "    def emit(self, x):\n"
        "        from {name}.late import constant\n"
        "        return helper(x) * constant\n"
        "class Other(Double):\n"
        "    pass\n"
    ),
    "math.py": "from . import deep\ndef helper(x):\n    return deep.FACTOR * x\n",
    "deep/__init__.py": "FACTOR = 2\n",
    "late.py": "constant = 1\n",
    "unrelated.py": "x = 1\n",
}


@pytest.fixture
def user_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., types.ModuleType]:
    """Writes and imports a user's package, with some files changed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str, changes: dict[str, str] | None = None) -> types.ModuleType:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        files = {**FILES, **(changes or {})}
        write_package(
            tmp_path, name, {file: text.replace("{name}", name) for file, text in files.items()}
        )
        importlib.invalidate_caches()
        sources._file_digest.cache_clear()
        return importlib.import_module(f"{name}.nodes")

    return load


def test_a_node_class_brings_its_file_and_what_that_imports(
    user_package: Callable[..., types.ModuleType],
) -> None:
    original = python_sources(user_package("mynodes").Double)
    assert original.memory_only == ""
    assert python_sources(user_package("mynodes").Double) == original
    changes = {
        "nodes.py": FILES["nodes.py"].replace("* constant", "+ constant"),
        "math.py": FILES["math.py"].replace("* x", "+ x"),
        "deep/__init__.py": "FACTOR = 4\n",
        "late.py": "constant = 3\n",
    }
    for file, text in changes.items():
        changed = python_sources(user_package("mynodes", {file: text}).Double)
        assert changed != original, file
        assert changed.memory_only == ""
    unrelated = python_sources(user_package("mynodes", {"unrelated.py": "x = 2\n"}).Double)
    assert unrelated == original


def test_two_classes_of_one_file_differ_and_a_base_counts(
    user_package: Callable[..., types.ModuleType],
) -> None:
    module = user_package("mynodes")
    double, other = python_sources(module.Double), python_sources(module.Other)
    assert set(double.files) < set(other.files)


def test_the_folder_of_a_checkout_is_not_in_the_key(
    tmp_path: Path, user_package: Callable[..., types.ModuleType]
) -> None:
    package = write_package(tmp_path / "elsewhere", "copy", {"kernel.py": "x = 1\n"})
    other = write_package(tmp_path / "other" / "place", "copy", {"kernel.py": "x = 1\n"})
    assert python_sources(package / "kernel.py") == python_sources(other / "kernel.py")
    (file,) = python_sources(package / "kernel.py").files
    assert file[0] == "kernel.py"


def test_classes_whose_text_does_not_pin_them_down_stay_in_memory() -> None:
    def make(factor: int) -> type:
        class Local:
            value = factor

        return Local

    namespace: dict[str, type] = {}
    exec("class Typed: pass", {"__name__": "nowhere"}, namespace)
    exec("class Hidden: pass", {"__name__": __name__}, namespace)
    two, three = python_sources(make(2)), python_sources(make(3))
    assert "inside a function" in two.memory_only
    assert two != three
    assert "no source file" in python_sources(namespace["Typed"]).memory_only
    assert "not in the source" in python_sources(namespace["Hidden"]).memory_only
    assert python_sources(namespace["Typed"]) == python_sources(namespace["Typed"])
    assert python_sources(UserNode).memory_only == ""
    assert fake_key("a", sources=two + python_sources(UserNode)).memory_only == two.memory_only


def test_a_file_edited_after_the_start_is_not_trusted_for_the_disk(tmp_path: Path) -> None:
    package = write_package(tmp_path, "late", {"kernel.py": "x = 1\n"})
    assert python_sources(package / "kernel.py").memory_only == ""
    (package / "kernel.py").write_text("x = 2\n")
    edited = python_sources(package / "kernel.py")
    assert "kernel.py was changed while this process was running" in edited.memory_only
    in_the_future = time.time() + 1e6  # a clock that was wrong when the file was unpacked
    os.utime(package / "kernel.py", (in_the_future, in_the_future))
    assert python_sources(package / "kernel.py").memory_only == ""


def test_our_own_node_classes_bring_the_epilogue_package() -> None:
    names = {name for name, _ in python_sources(Node).files}
    assert names == {name for name, _ in python_sources(fusedops.epilogue).files}
    assert "fusedops.epilogue/base.py" in names
    assert names < {name for name, _ in python_sources(Subclass).files}


def test_a_package_a_module_and_a_path_are_hashed_by_logical_names(tmp_path: Path) -> None:
    package = python_sources(fusedops.jit)
    module = python_sources(sources)
    assert {name for name, _ in module.files} == {"fusedops.jit.sources"}
    assert ("fusedops.jit/sources.py", module.files[0][1]) in package.files
    assert python_sources(fusedops.jit, sources) == package + module
    assert python_sources(sources, fusedops.jit) == package + module
    for name, _ in (package + module).files:
        assert not name.startswith("/")
    with pytest.raises(BuildError, match=r"nowhere\.py"):
        python_sources(tmp_path / "nowhere.py")
    assert "no source file" in python_sources(types.ModuleType("typed")).memory_only


# --- CUDA sources


def write_csrc(folder: Path, **files: str) -> Path:
    root = folder / "csrc"
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path = path.with_suffix(".cu" if path.parent.name != "include" else ".cuh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CSRC = {
    "main": '#include <cuda_bf16.h>\n  #  include "a.cuh"\n#include <b.cuh>\n',
    "include__a": '#pragma once\n#include "c.cuh"\n',
    "include__b": "",
    "include__c": '#include "a.cuh"\n',
    "include__unused": "",
}


def test_a_cuda_source_brings_all_it_includes(tmp_path: Path) -> None:
    root = write_csrc(tmp_path, **CSRC)
    original = cuda_sources("main.cu", root)
    assert [name for name, _ in original.files] == [
        "include/a.cuh",
        "include/b.cuh",
        "include/c.cuh",
        "main.cu",
    ]
    for name in ("main", "include__a", "include__b", "include__c"):
        changed = write_csrc(tmp_path / name, **{**CSRC, name: CSRC[name] + "// changed\n"})
        assert cuda_sources("main.cu", changed) != original
    unused = write_csrc(tmp_path / "u", **{**CSRC, "include__unused": "// changed\n"})
    assert cuda_sources("main.cu", unused) == original


def test_an_include_beside_the_file_is_found_before_one_in_the_include_folder(
    tmp_path: Path,
) -> None:
    root = write_csrc(tmp_path, ladders__step='#include "a.cu"\n', ladders__a="", include__a="")
    assert [name for name, _ in cuda_sources("ladders/step.cu", root).files] == [
        "ladders/a.cu",
        "ladders/step.cu",
    ]


@pytest.mark.parametrize("include", ["cuda_bf16.h", "../outside.cuh"])
def test_a_quoted_include_outside_csrc_is_refused(include: str, tmp_path: Path) -> None:
    (tmp_path / "outside.cuh").write_text("")
    root = write_csrc(tmp_path, main=f'#include "{include}"\n')
    with pytest.raises(BuildError, match="neither beside it nor in csrc/include"):
        cuda_sources("main.cu", root)


def test_a_missing_cuda_source_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"no_such\.cu"):
        cuda_sources("no_such.cu")


def test_b58_csrc_is_found_and_its_absence_names_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert csrc_dir() in (PACKAGE_DIR / "csrc", PACKAGE_DIR.parent / "csrc")
    monkeypatch.setattr("fusedops.jit.resources.PACKAGE_DIR", tmp_path / "fusedops")
    with pytest.raises(BuildError) as caught:
        csrc_dir()
    assert str(tmp_path / "fusedops" / "csrc") in str(caught.value)
    assert str(tmp_path / "csrc") in str(caught.value)
    for place in (tmp_path, tmp_path / "fusedops"):
        write_csrc(place, probe="")
        assert csrc_dir() == place / "csrc"
