"""``fusedops demo --shape``: a whole decode step of a real shape, measured.

The step runs from the embedding to the sampled (greedy) token: every layer, the append to the paged
cache, the head, and the positions that advance, all in one CUDA graph. Weights are random, of the
real shape, in bfloat16. Plain torch's step of the same model is captured and measured in turn with
ours, and every contender's first step is checked against it before its time counts.

The products are pinned to one provider (``--provider``). ``cublas`` gives the baselines: with the
other operations on FlashInfer's kernels, or torch's where FlashInfer is absent.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fusedops.bench.environment import collect_environment
from fusedops.bench.roofline import PUBLISHED_CEILINGS, ceilings
from fusedops.bench.runner import Runner, make_runner
from fusedops.bench.timer import Protocol
from fusedops.check import require_choice
from fusedops.errors import ConfigError, DeviceError, UnsupportedError
from fusedops.providers.flashinfer_attention import CUDA_CORE_GROUPS, HEAD_DIMS
from fusedops.providers.flashinfer_base import absent
from fusedops.providers.gemm import GEMM_PROVIDERS
from serving_demo.cache import DEFAULT_PAGE_SIZE, PagedKVCache
from serving_demo.check import require_int, require_type
from serving_demo.config import ModelConfig
from serving_demo.files import require_writable_target, written_line
from serving_demo.model import DecoderModel
from serving_demo.options import ATTENTIONS, ShapeOptions
from serving_demo.random_model import (
    fill_cache,
    kv_bytes_per_position,
    random_model,
    weight_bytes,
)
from serving_demo.shapes import Shape, shape_by_name
from serving_demo.step_model import ADVANCES, FusedStep, StepBatch, StepProviders
from serving_demo.step_report import StepFloor, StepRow, step_row, steps_table, write_steps
from serving_demo.step_timing import HostWorkRunner, Oracle, Step, time_steps
from serving_demo.step_torch import PlainStep, PlainWeights

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ShapeOptions", "check_shape_options", "measure_shape", "run_shapes"]

TORCH_GRAPH = "torch graph"
OURS = "fusedops"

_SPARE_BYTES = 6 << 30
"""GPU memory left to activations, FlashInfer's scratch, graphs and the context."""


def check_shape_options(options: ShapeOptions) -> Shape:
    """The shape asked for; refuses what cannot run, before anything is made.

    Raises:
        ConfigError: a name or a number is not accepted, or the JSON's folder does not exist.
    """
    shape = shape_by_name(options.shape)
    require_type("batches", options.batches, (tuple, list), "is a tuple of integers from 1")
    if not options.batches:
        raise ConfigError("batches is empty; accepted are one or more integers from 1 (--batch).")
    for size in options.batches:
        require_int("a batch", size, 1)
    if len(set(options.batches)) != len(options.batches):
        raise ConfigError(f"batches are {options.batches}; accepted is each size once (--batch).")
    require_int("context", options.context, 1)
    longest = shape.config.max_positions - ADVANCES + 1
    if options.context > longest:
        raise ConfigError(
            f"context is {options.context:,}; accepted are 1 to {longest:,} for {shape.name} "
            f"({ADVANCES - 1} more positions follow it)."
        )
    require_choice("demo", "provider", options.provider, list(GEMM_PROVIDERS))
    require_choice("demo", "attention", options.attention, ATTENTIONS)
    require_int("replays", options.replays, 1)
    require_int("seed", options.seed)
    if options.json_path is not None:
        require_writable_target(options.json_path)
    return shape


def _resolve_attention(options: ShapeOptions, config: ModelConfig) -> tuple[str, str]:
    """(flashinfer or torch, why not flashinfer under "auto")."""
    if options.attention == "torch":
        return "torch", ""
    reason = absent()
    group = config.n_heads // config.n_kv_heads
    if reason is None and config.head_dim not in HEAD_DIMS:
        reason = f"FlashInfer has no decode kernel for head dim {config.head_dim}"
    if reason is None and group not in CUDA_CORE_GROUPS and not options.tensor_cores:
        reason = (
            f"FlashInfer's CUDA-core kernel takes {CUDA_CORE_GROUPS} query heads a KV head, not "
            f"{group}; --tensor-cores builds and takes its other kernel"
        )
    if reason is None:
        return "flashinfer", ""
    if options.attention == "flashinfer":
        raise UnsupportedError(f"attention through FlashInfer, on {options.shape}: {reason}")
    return "torch", reason


def _contenders(options: ShapeOptions, attention: str) -> dict[str, StepProviders]:
    """Our contenders by name: FlashInfer's norms round once, so torch's are shown beside them."""
    if attention == "torch":
        return {OURS: StepProviders(options.provider, "torch", "torch", "torch", "torch")}
    fast = StepProviders(options.provider, "flashinfer", "flashinfer", "torch", "flashinfer")
    return {OURS: fast, f"{OURS}, norms by torch": replace(fast, norm="torch")}


def run_shapes(options: ShapeOptions, console: Console | None = None) -> tuple[StepRow, ...]:
    """Measure a shape's decode steps on the current GPU.

    Args:
        options: what to measure.
        console: where to write; default: standard output. A quiet console shows nothing.

    Returns:
        The rows, already added to ``options.json_path`` where that is given. A contender that
        failed its check has a row with the reason and no time.

    Raises:
        ConfigError: the options are not acceptable, or the GPU's memory is too small.
        DeviceError: torch sees no GPU.
        UnsupportedError: FlashInfer is asked for and is absent, or has no kernel for the heads.
    """
    from rich.console import Console

    console = console or Console()
    shape = check_shape_options(options)
    if not torch.cuda.is_available():
        raise DeviceError(
            f"--shape measures on a GPU, but torch {torch.__version__} sees none; run it on a "
            "machine with an NVIDIA GPU, or the demo's real model without --shape."
        )
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    _require_memory(options, shape.config, dtype, device)
    attention, reason = _resolve_attention(options, shape.config)
    gpu = torch.cuda.get_device_name(device)
    limits = PUBLISHED_CEILINGS.get(gpu) or ceilings(device)
    rows = measure_shape(
        options,
        shape.config,
        _contenders(options, attention),
        device=device,
        dtype=dtype,
        read_bytes_per_s=limits.read_bytes_per_s,
        runner=make_runner(device),
    )
    title = f"{shape.name}, context {options.context}, bf16, on {gpu}"
    console.print(steps_table(title, rows))
    remarks = [shape.note, f"attention by torch: {reason}" if reason else ""]
    remarks += [f"batch {row.batch}, {row.contender}: {note}" for row in rows for note in row.notes]
    for remark in filter(None, remarks):
        console.print(remark, highlight=False, soft_wrap=True)
    if options.json_path is not None:
        write_steps(options.json_path, rows, collect_environment())
        console.print(
            written_line(options.json_path), markup=False, highlight=False, soft_wrap=True
        )
    return rows


def _require_memory(
    options: ShapeOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    # Plain torch packs gate and up its own way and keeps a cache of its own.
    positions = max(options.batches) * (options.context + DEFAULT_PAGE_SIZE + ADVANCES)
    packed = 2 * config.n_layers * config.intermediate_size * config.hidden_size * dtype.itemsize
    needed = weight_bytes(config, dtype) + packed + _SPARE_BYTES
    needed += 2 * positions * kv_bytes_per_position(config, dtype)
    if needed > free:
        raise ConfigError(
            f"{options.shape} with a batch of {max(options.batches)} takes about "
            f"{needed / 1e9:.0f} GB of GPU memory, but {free / 1e9:.0f} GB are free; lower --batch "
            "or --context."
        )


@torch.inference_mode()
def measure_shape(
    options: ShapeOptions,
    config: ModelConfig,
    contenders: dict[str, StepProviders],
    *,
    device: torch.device,
    dtype: torch.dtype,
    read_bytes_per_s: float,
    runner: Runner,
    protocol: Protocol | None = None,
) -> tuple[StepRow, ...]:
    """The rows of one model: plain torch and ``contenders`` at every batch size.

    Args:
        options: batches, context, replays, seed, the row's names; nothing else is read.
        config: the model's shape.
        contenders: name -> who runs what.
        device, dtype: where and in what the model runs.
        read_bytes_per_s: the bandwidth that floors are computed with.
        runner: times on ``device``.
        protocol: lengths and caps; default: ``replays`` samples, and the caps of a report.
    """
    protocol = protocol or Protocol(
        samples=options.replays, min_samples=min(5, options.replays), cap_s=20.0, settle_max_s=2.0
    )
    n_positions = options.context + ADVANCES
    model = random_model(config, n_positions, device, dtype, options.seed)
    weights = PlainWeights(model)
    floor = StepFloor(
        model.weight_bytes_per_step, kv_bytes_per_position(config, dtype), read_bytes_per_s
    )
    planned = HostWorkRunner(runner)
    rows: list[StepRow] = []
    for batch_size in options.batches:
        rows += _batch_rows(
            options, model, weights, contenders, batch_size, floor, planned, protocol
        )
        if device.type == "cuda":
            # The next batch's cache takes other sizes than the blocks that are free now.
            gc.collect()
            torch.cuda.empty_cache()
    return tuple(rows)


def _batch_rows(
    options: ShapeOptions,
    model: DecoderModel,
    weights: PlainWeights,
    contenders: dict[str, StepProviders],
    batch_size: int,
    floor: StepFloor,
    runner: HostWorkRunner,
    protocol: Protocol,
) -> list[StepRow]:
    pages = batch_size * StepBatch.pages_each(options.context, DEFAULT_PAGE_SIZE)
    cache = PagedKVCache(model.config, pages, DEFAULT_PAGE_SIZE, model.dtype, model.device)
    fill_cache(cache, options.context, options.seed)
    batch = StepBatch.make(model, cache, batch_size, options.context, options.seed)
    plain = PlainStep(TORCH_GRAPH, batch, weights)
    oracle = Oracle.of(plain, model.config.n_layers)
    steps: list[Step] = [plain]
    who = {plain.name: {"provider": "torch", "norms": "torch", "rope": "torch"}}
    who[plain.name]["attention"] = "sdpa"
    for name, by in contenders.items():
        steps.append(FusedStep(name, batch, by, options.tensor_cores))
        who[name] = {"provider": by.gemm, "norms": by.norm, "rope": by.rope}
        who[name]["attention"] = by.attention
    times = time_steps(steps, oracle, runner, protocol)
    return [
        step_row(
            options.shape,
            batch_size,
            options.context,
            step.name,
            who[step.name],
            times[step.name],
            floor.ms(batch_size, step.mean_length),
        )
        for step in steps
    ]
