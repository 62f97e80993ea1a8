"""``run_demo``: load a model, answer some prompts at once, and measure it beside transformers."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from rich.console import Console

from serving_demo.bandwidth import measure_read_bandwidth
from serving_demo.cache import require_fit
from serving_demo.checkpoint import Checkpoint
from serving_demo.console import LoadingBars, TextStreams
from serving_demo.engine import Engine, Generation, Request
from serving_demo.files import written_line
from serving_demo.loader import default_model_path, load_checkpoint, require_model
from serving_demo.model import DecoderModel
from serving_demo.options import DemoOptions, check_options, resolve_device, resolve_dtype
from serving_demo.report import (
    DemoReport,
    RunFigures,
    figures_of,
    machine_facts,
    table_of,
    write_json,
)

__all__ = ["run_demo"]

_WARM_UP_TOKENS = 3
"""The first steps of either contender choose algorithms and touch memory for the first time."""


class _Stopwatch:
    """Wall time of a run's parts, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": time.perf_counter() - self._started}


def _requests(options: DemoOptions, checkpoint: Checkpoint) -> list[Request]:
    """The prompts as tokens; raises ShapeError where one does not fit the model."""
    requests: list[Request] = []
    for index, prompt in enumerate(options.prompts):
        ids = checkpoint.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        require_fit(index, len(ids), options.max_new_tokens, checkpoint.config.max_positions)
        requests.append(
            Request(tuple(ids), options.max_new_tokens, options.temperature, options.seed + index)
        )
    return requests


def _short(requests: Sequence[Request]) -> list[Request]:
    """The same prompts with a few tokens to follow: a warm-up."""
    return [
        replace(request, max_new_tokens=min(_WARM_UP_TOKENS, request.max_new_tokens))
        for request in requests
    ]


def _answer(
    engine: Engine,
    requests: Sequence[Request],
    checkpoint: Checkpoint,
    options: DemoOptions,
    console: Console,
) -> Generation:
    decoders = [checkpoint.tokenizer.stream() for _ in requests]
    to_come = [request.max_new_tokens for request in requests]
    with TextStreams(console, options.prompts) as streams:

        def show(index: int, token: int) -> None:
            to_come[index] -= 1
            streams.push(index, decoders[index].push(token))
            if not to_come[index] or token in checkpoint.config.eos_token_ids:
                streams.end(index)

        return engine.generate(requests, show)


def _compare(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    dtype: torch.dtype,
    device: torch.device,
    watch: _Stopwatch,
) -> tuple[Generation, Generation]:
    """transformers' runs: all prompts as one batch, and prompt by prompt; one run of one prompt."""
    from serving_demo.contender import load_contender

    with watch.part("load transformers"):
        contender = load_contender(checkpoint, dtype, device)
    with watch.part("transformers"):
        contender.one_by_one(_short(requests[:1]))
        if len(requests) == 1:
            alone = contender.one_by_one(requests)
            return alone, alone
        contender.batched(_short(requests))
        return contender.batched(requests), contender.one_by_one(requests)


def _comparison_line(checkpoint: Checkpoint, dtype: torch.dtype, n_prompts: int) -> str:
    source = (
        "its own loader"
        if checkpoint.hf_config is not None
        else "the weights dequantised here, as its own GGUF loader is slow"
    )
    name = str(dtype).removeprefix("torch.")
    how = "speed: left-padded batch and prompt by prompt; tokens: prompt by prompt"
    if n_prompts == 1:
        how = "speed and tokens: the one prompt"
    return f"transformers' generate, use_cache, {name}, from {source}; {how}"


def run_demo(options: DemoOptions, console: Console | None = None) -> DemoReport:
    """The main job: answer the prompts together, show the text as it comes, and measure.

    The figures of fusedops and transformers come from this one run, after a warm-up of each; the
    bytes of a step are set against the read bandwidth measured in between.

    Args:
        options: what to run.
        console: where to write; default: standard output. A quiet console shows nothing.

    Returns:
        The report, already written to ``options.json_path`` where that is given.

    Raises:
        ConfigError, DeviceError, LoadError, ShapeError: the options or the model are not
            acceptable; nothing has been written then.
    """
    try:
        return _run(options, console or Console())
    finally:
        gc.unfreeze()


def _run(options: DemoOptions, console: Console) -> DemoReport:
    watch = _Stopwatch()
    check_options(options)
    path = options.model or default_model_path()
    require_model(path)
    # What was written wrong has been named by now; here comes what this machine lacks.
    device = resolve_device(options)
    dtype = resolve_dtype(options, device)
    with LoadingBars(console) as bars:
        with watch.part("load"):
            checkpoint = load_checkpoint(path, dtype, bars.track)
            requests = _requests(options, checkpoint)
            capacity = max(len(r.prompt) for r in requests) + options.max_new_tokens - 1
        with watch.part("pack"):
            model = DecoderModel.from_checkpoint(checkpoint, device, capacity, bars.track)
            engine = Engine(model, len(requests), capacity)
    # What was loaded stays: walking it again and again would cost a few percent of a step.
    gc.collect()
    gc.freeze()
    with watch.part("warm up"):
        engine.generate(_short(requests))
    with watch.part("read bandwidth"):
        bandwidth = measure_read_bandwidth(device)
    with watch.part("fusedops"):
        ours = _answer(engine, requests, checkpoint, options, console)

    kv_bytes = checkpoint.config.kv_elements_per_position * dtype.itemsize
    weight_bytes = model.weight_bytes_per_step

    def figures(name: str, generation: Generation) -> RunFigures:
        return figures_of(name, generation, weight_bytes, kv_bytes, bandwidth)

    runs = [figures(f"fusedops x{len(requests)}", ours)]
    equal: int | None = None
    comparison = "--no-compare"
    if options.compare:
        batched, single = _compare(checkpoint, requests, dtype, device, watch)
        if len(requests) > 1:
            runs.append(figures(f"transformers x{len(requests)}", batched))
        runs.append(figures("transformers x1", single))
        comparison = _comparison_line(checkpoint, dtype, len(requests))
        if options.temperature == 0:
            equal = sum(a == b for a, b in zip(ours.tokens, single.tokens, strict=True))
        else:
            comparison = f"sampled at temperature {options.temperature}; {comparison}"
    report = DemoReport(
        model=str(path),
        weight_format=checkpoint.weight_format,
        device=_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=options.prompts,
        texts=tuple(checkpoint.tokenizer.decode(tokens) for tokens in ours.tokens),
        tokens=ours.tokens,
        figures=tuple(runs),
        read_bandwidth=bandwidth,
        prompts_equal=equal,
        comparison=comparison,
        seconds=watch.total(),
        machine=machine_facts(device),
    )
    if options.json_path is not None:
        write_json(report, options.json_path)
    console.print(table_of(report))
    console.print(report.equality_line, markup=False, highlight=False, soft_wrap=True)
    if options.json_path is not None:
        console.print(
            written_line(options.json_path), markup=False, highlight=False, soft_wrap=True
        )
    return report


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"
