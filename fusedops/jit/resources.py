"""Where the CUDA sources lie: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

from fusedops.errors import BuildError

__all__ = ["PACKAGE_DIR", "csrc_dir"]

PACKAGE_DIR = Path(__file__).resolve().parent.parent
"""The folder of the package ``fusedops``; nothing below it is ever written."""

# A folder called csrc beside the package could be anybody's; this file makes it ours.
_MARKER = "probe.cu"


def csrc_dir() -> Path:
    """The folder of the CUDA sources: ``fusedops/csrc`` (wheel), else ``../csrc`` (checkout).

    Raises:
        BuildError: neither folder holds the sources.
    """
    candidates = (PACKAGE_DIR / "csrc", PACKAGE_DIR.parent / "csrc")
    for folder in candidates:
        if (folder / _MARKER).is_file():
            return folder
    raise BuildError(
        f"the CUDA sources are missing: neither {candidates[0]} nor {candidates[1]} holds "
        f"{_MARKER}. Install fusedops from its wheel, or run it from a complete checkout."
    )
