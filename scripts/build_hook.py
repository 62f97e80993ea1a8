"""Build hook: puts csrc/ and cutlass_configs/ inside the package `fusedops` in the wheel.

An editable install gets no copies: there the folders beside the package are the ones in use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RESOURCE_FOLDERS = ("csrc", "cutlass_configs")


class ResourceFolders(BuildHookInterface):
    """Adds every file of the resource folders to a standard wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is built; ``version`` is its kind."""
        if version == "editable":
            return
        for folder in RESOURCE_FOLDERS:
            source = Path(self.root) / folder
            if source.is_dir():
                build_data["force_include"][str(source)] = f"fusedops/{folder}"
