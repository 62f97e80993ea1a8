"""``KernelKey``: what decides whether a stored kernel is the one asked for.

The key hashes the spec, the sources, the tools and their versions, the architecture and the flags.
It holds no path, host name, time, torch version or anything that changes from run to run, so the
second start of a program compiles nothing, and a kernel built on one machine serves another.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

from fusedops.errors import ConfigError
from fusedops.jit.sources import Sources

__all__ = ["KernelKey", "distribution_versions", "is_entry_name"]

_KEY_FORMAT = 1
_ARCH = re.compile(r"sm_\d{2,3}[af]?")
_SPEC_CHARACTERS = 160
_NAME_DIGITS = 32  # 128 bits of each hash: no collision in practice, and a short folder name
_ENTRY_NAME = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.[0-9a-f]{{{_NAME_DIGITS}}}")


def distribution_versions(*names: str) -> dict[str, str | None]:
    """Installed version of each distribution; None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True, eq=False)
class KernelKey:
    """Identity of one compiled kernel (or of one binary with several).

    Attributes:
        family: kernel family for people and for cache commands, e.g. ``"csrc/norm.cu"``.
        spec: canonical spec string: everything that the emitted code depends on.
        arch: the architecture compiled for, e.g. ``"sm_90a"``; never guessed from this machine.
        sources: content hashes of what the kernel is made of.
        toolchain: version of each tool that shapes the binary or that loading it needs. A version
            is None where the tool is not installed: then nothing can be compiled, and a kernel
            built by any version of that tool is accepted.
        flags: compiler flags, in order.

    Raises:
        ConfigError: ``arch`` is not of the form sm_80, sm_90a, sm_100f.
    """

    family: str
    spec: str
    arch: str
    sources: Sources
    toolchain: Mapping[str, str | None]
    flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not _ARCH.fullmatch(self.arch):
            raise ConfigError(
                f"{self.family}: arch={self.arch!r}; accepted are names like sm_80, sm_90a and "
                "sm_100a. Change the arch that the kernel is asked for."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def memory_only(self) -> str:
        """Why the kernel may not be stored on disk; empty when it may."""
        return self.sources.memory_only

    @cached_property
    def fields(self) -> dict[str, object]:
        """All that is hashed except the toolchain, as plain JSON values."""
        return {
            "format": _KEY_FORMAT,
            "family": self.family,
            "spec": self.spec,
            "arch": self.arch,
            "flags": list(self.flags),
            "sources": [list(pair) for pair in self.sources.files],
        }

    @cached_property
    def source_digest(self) -> str:
        """Hash of everything but the toolchain (64 hex digits)."""
        return _sha256(self.fields)

    @cached_property
    def digest(self) -> str:
        """Hash of everything (64 hex digits)."""
        return _sha256([self.source_digest, dict(self.toolchain)])

    @property
    def prefix(self) -> str:
        """How the folders of this kernel begin, whatever the toolchain's versions."""
        return self.source_digest[:_NAME_DIGITS] + "."

    @cached_property
    def name(self) -> str:
        """Folder name of the kernel's entry: ``<source digest>.<digest>``."""
        return self.prefix + self.digest[:_NAME_DIGITS]

    @property
    def missing_tools(self) -> tuple[str, ...]:
        """Tools of the toolchain that are not installed here."""
        return tuple(name for name, version in self.toolchain.items() if version is None)

    def accepts_toolchain(self, built_with: Mapping[str, object]) -> bool:
        """Whether a kernel built with these versions serves: all installed tools must agree."""
        return built_with.keys() == self.toolchain.keys() and all(
            version is None or built_with[name] == version
            for name, version in self.toolchain.items()
        )

    def describe(self) -> str:
        """``csrc/probe.cu [fusedops::scale<float>] for sm_90a``: how messages name the kernel."""
        return f"{self.family} [{textwrap.shorten(self.spec, _SPEC_CHARACTERS)}] for {self.arch}"


def is_entry_name(name: str) -> bool:
    """Whether a folder name is one that ``KernelKey.name`` gives."""
    return (
        re.fullmatch(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.[0-9a-f]{{{_NAME_DIGITS}}}", name) is not None
    )
