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
from fusedops.nn.convert import convert
from fusedops.ops.activation import act_and_mul
from fusedops.ops.attention import paged_attention
from fusedops.ops.embedding import embedding, embedding_sumsq
from fusedops.ops.fused_quantize import (
    act_and_mul_quantize,
    fused_add_rms_norm_quantize,
    layer_norm_quantize,
    rms_norm_quantize,
    transpose_quantize,
)
from fusedops.ops.histogram import bincount, expert_histogram, histogram
from fusedops.ops.kv_append import append_paged_kv
from fusedops.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, layer_norm, rms_norm
from fusedops.ops.op import OPS as _OPS
from fusedops.ops.quantize import dequantize, quantize
from fusedops.ops.reduce import reduce
from fusedops.ops.rope_append import rope_append_paged_kv_
from fusedops.ops.rope_kv import rope, rope_
from fusedops.ops.rope_table import RopeScaling, rope_table
from fusedops.ops.sampling import greedy, sample
from fusedops.ops.transpose import transpose
from fusedops.providers import cuda as _cuda
from fusedops.providers import cutlass as _cutlass
from fusedops.providers import cutlass_sm80 as _cutlass_sm80
from fusedops.providers import flashinfer as _flashinfer
from fusedops.providers.base import use_provider

_cuda.register(_OPS)
_cutlass.register()
_cutlass_sm80.register()
_flashinfer.register(_OPS)

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
    "RopeScaling",
    "ShapeError",
    "UnsupportedError",
    "__version__",
    "act_and_mul",
    "act_and_mul_quantize",
    "append_paged_kv",
    "bincount",
    "convert",
    "dequantize",
    "embedding",
    "embedding_sumsq",
    "expert_histogram",
    "explain",
    "explain_problem",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_quantize",
    "gemm",
    "greedy",
    "histogram",
    "layer_norm",
    "layer_norm_quantize",
    "paged_attention",
    "quantize",
    "reduce",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_",
    "rope_append_paged_kv_",
    "rope_table",
    "sample",
    "transpose",
    "transpose_quantize",
    "use_provider",
]
