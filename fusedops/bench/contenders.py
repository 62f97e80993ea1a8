"""Contenders of a row: different ways to do the same work on the same data.

``measure`` is steps 1 and 2 of the protocol (buffers, rotation, checks) and hands the rest to the
timer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.data import Buffers, poison, refuse_constant, rotation_sets, total_bytes
from fusedops.bench.measurement import Outcome
from fusedops.bench.runner import Replay, Runner, make_runner
from fusedops.bench.timer import Program, Protocol, time_programs
from fusedops.errors import ConfigError

__all__ = ["Contender", "measure"]


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a row.

    Attributes:
        name: as the table shows it; unique in a row.
        run: called with the state that ``prepare`` made of a set of buffers; launches the work on
            the current stream and returns its result(s), or None if they are the set's outputs.
        check: called with the results (a tuple) and the buffers they came from; returns what is
            wrong, or None. Every contender is checked, peers too.
        prepare: makes the state of one set of buffers, outside any timing (packing weights,
            planning); by default the state is the set itself.
        in_place: the work overwrites its inputs; then only the first launch can be checked.
    """

    name: str
    run: Callable[[Any], Tensor | tuple[Tensor, ...] | None]
    check: Callable[[tuple[Tensor, ...], Buffers], str | None]
    prepare: Callable[[Buffers], Any] | None = None
    in_place: bool = False


def measure(
    contenders: Sequence[Contender],
    make_buffers: Callable[[torch.Generator], Buffers],
    *,
    device: torch.device | str,
    hot: bool = False,
    flush: bool = False,
    protocol: Protocol | None = None,
    runner: Runner | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Outcome]:
    """Time contenders that do the same work on the same data.

    Args:
        contenders: alternated launch by launch.
        make_buffers: makes one set of buffers from a generator on ``device``; called once a set.
        device: a CUDA device, or the CPU (then rows are hot, timed by the host's clock).
        hot: use one set again and again, and say so in the rows.
        flush: instead of rotating sets, time single launches after a flush of the L2. For work on
            buffers too small to rotate; noisier.
        protocol: lengths and caps; the default is the one that reports use.
        runner: replaces the device's own runner (tests).

    Returns:
        name -> ``Measurement`` or ``Failed``, in the order of ``contenders``.

    Raises:
        ConfigError: constant input data, duplicate names, or sets too small to rotate past the L2.
        DeviceError: the device is absent.
    """
    if hot and flush:
        raise ConfigError(
            "measure: hot=True keeps caches full and flush=True empties them; pick one."
        )
    protocol = protocol or Protocol()
    runner = runner or make_runner(device)
    sets = [_make_set(make_buffers, device, 0)]
    count = 1
    if runner.cache_bytes and not (hot or flush):
        set_bytes = total_bytes(sets[0].tensors)
        count = rotation_sets(set_bytes, runner.cache_bytes)
        if count > protocol.max_launches:
            raise ConfigError(
                f"measure: one launch touches {set_bytes} bytes, so rotating past a cache of "
                f"{runner.cache_bytes} bytes takes {count} sets, and a program holds at most "
                f"{protocol.max_launches} launches; pass flush=True or hot=True."
            )
    sets += [_make_set(make_buffers, device, seed) for seed in range(1, count)]
    # Everything above is done before the first flush: inputs made after it would sit in the cache.
    rotates = count > 1
    programs = [
        _program(contender, sets, runner, launches=1 if flush else None) for contender in contenders
    ]
    return time_programs(
        programs,
        runner,
        protocol=protocol,
        hot=not (rotates or flush),
        subtract_empty=flush,
        clock=clock,
    )


def _make_set(
    make_buffers: Callable[[torch.Generator], Buffers], device: torch.device | str, seed: int
) -> Buffers:
    buffers = make_buffers(torch.Generator(device=device).manual_seed(seed))
    refuse_constant(buffers.inputs)
    return buffers


def _program(
    contender: Contender, sets: Sequence[Buffers], runner: Runner, launches: int | None
) -> Program:
    original = sets[0]
    states: list[Any] = []
    # Results that the contender allocates stay alive for one rotation, so that they rotate as well.
    results: deque[Any] = deque(maxlen=len(sets))
    if contender.in_place:
        # The others must not find their inputs overwritten.
        sets = [_clone(buffers) for buffers in sets]

    def prepared() -> list[Any]:
        if not states:
            prepare = contender.prepare
            states.extend(buffers if prepare is None else prepare(buffers) for buffers in sets)
        return states

    def enqueue(count: int) -> None:
        results.clear()
        every = prepared()
        for number in range(count):
            results.append(contender.run(every[number % len(every)]))

    def verdict(result: Any, buffers: Buffers) -> str | None:
        runner.synchronize()
        tensors = _as_tuple(result, buffers)
        for tensor in tensors:
            if _has_nan(tensor):
                return "the result holds NaN (or was not written)"
        return contender.check(tensors, buffers)

    def check() -> str | None:
        state = prepared()[0]
        for output in sets[0].outputs:
            poison(output)
        result = contender.run(state)
        if result is None and contender.in_place:
            result = sets[0].outputs or sets[0].inputs
        return verdict(result, replace(original, outputs=sets[0].outputs))

    def check_after(replay: Replay) -> str | None:
        # The program's last launch used the rotation's last set (launches are a multiple of it).
        last = sets[-1]
        for tensor in _as_tuple(results[-1], last):
            if not _shares_storage(tensor, last.inputs):
                poison(tensor)
        replay()
        return verdict(results[-1], last)

    return Program(
        contender.name,
        enqueue,
        check,
        step=len(sets),
        check_after=None if contender.in_place else check_after,
        launches=launches,
    )


def _as_tuple(result: Any, buffers: Buffers) -> tuple[Tensor, ...]:
    if result is None:
        return buffers.outputs
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _clone(buffers: Buffers) -> Buffers:
    return Buffers(
        tuple(tensor.clone() for tensor in buffers.inputs),
        tuple(tensor.clone() for tensor in buffers.outputs),
        buffers.indices,
    )


def _has_nan(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    wide = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
    return bool(wide.isnan().any())


def _shares_storage(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(storage == other.untyped_storage().data_ptr() for other in others)
