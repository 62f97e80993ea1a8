"""Ceilings of the ladders: those of every report, and the float32 peak of the CUDA cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

import torch

from fusedops.bench.roofline import Ceilings, row_ceilings
from fusedops.errors import DeviceError
from fusedops.ladders.walls import Wall

__all__ = ["LadderCeilings", "device_ceilings", "float32_flops_per_s"]

_LANES = {(8, 0): 64}
_USUAL_LANES = 128
"""Float32 multiply-adds a cycle and multiprocessor. Source: CUDA C++ Programming Guide,
"Throughput of Native Arithmetic Instructions"."""


@dataclass(frozen=True)
class LadderCeilings(Ceilings):
    """What a GPU reaches at best, in the pipes that steps compute with.

    Attributes:
        float32_flops_per_s: multiply-adds of the CUDA cores, counted as two, at the highest clock;
            derived, not measured.
    """

    float32_flops_per_s: float = field(kw_only=True)

    def flops_per_s(self, pipe: Wall) -> float:
        """The peak of the FMA pipe or of the tensor cores."""
        return self.float32_flops_per_s if pipe is Wall.FMA_PIPE else self.bf16_flops_per_s

    def under(self, pipe: Wall) -> Ceilings:
        """The same with that pipe's peak as the one that ``floor`` holds FLOPs to."""
        return replace(self, bf16_flops_per_s=self.flops_per_s(pipe))


def float32_flops_per_s(sms: int, capability: tuple[int, int], clock_hz: float) -> float:
    """Multiply-adds of all CUDA cores in every cycle, counted as two."""
    return 2.0 * sms * _LANES.get(capability, _USUAL_LANES) * clock_hz


def _highest_clock_hz(device: torch.device) -> float:
    from cuda.bindings import driver

    status, khz = driver.cuDeviceGetAttribute(
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, device.index or 0
    )
    if int(status) != 0 or not khz:
        raise DeviceError(
            f"cuDeviceGetAttribute of the clock rate of {device}: {status}, {khz} kHz"
        )
    return float(khz) * 1e3


def device_ceilings(device: torch.device) -> LadderCeilings:
    """The ceilings of a CUDA device.

    Raises:
        DeviceError: the driver does not tell its clock.
    """
    limits = row_ceilings(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    capability = torch.cuda.get_device_capability(device)
    clock_hz = _highest_clock_hz(device)
    peak = float32_flops_per_s(sms, capability, clock_hz)
    lanes = _LANES.get(capability, _USUAL_LANES)
    detail = (
        f"float32: {sms} multiprocessors x {lanes} lanes x 2 at {clock_hz / 1e9:.2f} GHz, the "
        "highest clock; derived, not measured"
    )
    known = {**asdict(limits), "details": (*limits.details, detail)}
    return LadderCeilings(**known, float32_flops_per_s=peak)
