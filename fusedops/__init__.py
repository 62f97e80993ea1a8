"""fusedops: fused operators for LLM serving on NVIDIA GPUs, for people who run PyTorch models."""

from __future__ import annotations

from fusedops.epilogue import Epilogue
from fusedops.errors import (
    BuildError,
    ConfigError,
    DeviceError,
    DTypeError,
    FusedOpsError,
    KernelMissingError,
    LaunchError,
    LayoutError,
    LoadError,
    PositionError,
    ShapeError,
    UnsupportedError,
)
from fusedops.gemm import explain, explain_problem, gemm
from fusedops.ops.activation import act_and_mul
from fusedops.ops.attention import paged_attention
from fusedops.ops.embedding import embedding
from fusedops.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, layer_norm, rms_norm
from fusedops.ops.rope_kv import append_paged_kv, rope, rope_
from fusedops.providers.base import use_provider

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "Epilogue",
    "FusedOpsError",
    "KernelMissingError",
    "LaunchError",
    "LayoutError",
    "LoadError",
    "PositionError",
    "ShapeError",
    "UnsupportedError",
    "__version__",
    "act_and_mul",
    "append_paged_kv",
    "embedding",
    "explain",
    "explain_problem",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "gemm",
    "layer_norm",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_",
    "use_provider",
]
