"""What a ladder is made of: problems, and steps that solve them, each with its lesson.

The lesson of a step is the comment that its kernel's file begins with, in three parts that start
with ``Idea:``, ``Wall:`` and ``Lever:``; it is written nowhere else.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.roofline import Traffic
from fusedops.errors import ConfigError
from fusedops.jit.launch import CudaKernel, cuda_module, device_arch
from fusedops.jit.nvrtc import CudaProgram
from fusedops.jit.resources import PACKAGE_DIR, csrc_dir
from fusedops.jit.sources import cuda_sources
from fusedops.ladders.walls import Wall

if TYPE_CHECKING:
    from fusedops.bench.products import Layer
    from fusedops.ladders.figures import Figure
    from fusedops.ladders.report import ResultRow

__all__ = [
    "Finding",
    "Ladder",
    "LadderKernel",
    "Lesson",
    "Problem",
    "Step",
    "own_step",
    "peer_step",
    "source_text",
]

_PARTS = ("Idea", "Wall", "Lever")
FOLDER = "ladders"

Run = Callable[[Any], Tensor | tuple[Tensor, ...] | None]
Check = Callable[[tuple[Tensor, ...], Buffers], str | None]


@dataclass(frozen=True)
class Lesson:
    """What a step teaches.

    Attributes:
        idea: what it does differently from the step before.
        wall: what it runs into; begins with the name of a ``Wall``.
        lever: what the next step pulls.
        lines: lines of code of its kernel and of the headers beside it, without comments and blank
            lines; 0 where the step's code is not in ``csrc/ladders``.
    """

    idea: str
    wall: str
    lever: str
    lines: int = 0

    @property
    def expected(self) -> Wall:
        """The wall that ``wall`` names.

        Raises:
            ConfigError: it begins with no wall's name.
        """
        for wall in Wall:
            if self.wall.startswith(wall.value):
                return wall
        names = ", ".join(wall.value for wall in Wall)
        raise ConfigError(f"the wall {self.wall!r} begins with no name; accepted are {names}.")


@functools.cache
def lesson_of(file: str) -> Lesson:
    """The lesson in the comment at the top of a file of csrc.

    Raises:
        ConfigError: one of the parts is missing.
        OSError: the file is not there.
    """
    text = source_text(file).splitlines()
    parts: dict[str, list[str]] = {}
    part = ""
    for line in text:
        if not line.startswith("//"):
            break
        words = line.removeprefix("//").strip()
        name, colon, rest = words.partition(":")
        if colon and name in _PARTS:
            part, words = name, rest.strip()
        parts.setdefault(part, []).append(words)
    missing = [name for name in _PARTS if name not in parts]
    if missing:
        raise ConfigError(
            f"csrc/{file}: its first comment lacks {', '.join(f'{name}:' for name in missing)}; "
            "begin the file with the three parts."
        )
    idea, wall, lever = (" ".join(parts[name]) for name in _PARTS)
    own = [name for name, _ in cuda_sources(file).files if name.startswith(f"{FOLDER}/")]
    return Lesson(idea, wall, lever, sum(map(_code_lines, own)))


def source_text(file: str) -> str:
    """The text of a file of csrc."""
    return (csrc_dir() / file).read_text(encoding="utf-8")


def _code_lines(file: str) -> int:
    lines = map(str.strip, source_text(file).splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


@dataclass(frozen=True)
class LadderKernel:
    """A kernel of ``csrc/ladders``.

    Attributes:
        file: path relative to csrc.
        name: name expression without the namespace, e.g. ``reduce_v5<8>``.
        parameters: as ``CudaModule.kernel`` takes them.
    """

    file: str
    name: str
    parameters: tuple[str, ...]

    @property
    def program(self) -> CudaProgram:
        """What is compiled."""
        return CudaProgram(self.file, (f"fusedops::{self.name}",))

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        args: Sequence[Tensor | int | float],
        shared_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch on the current stream of the first tensor's device; compiled when first used.

        Args:
            grid, threads, args, shared_bytes, pdl: as ``CudaKernel.launch``.

        Raises:
            BuildError, KernelMissingError, LaunchError, DeviceError: as ``CudaKernel.launch``.
        """
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        self.loaded(device).launch(grid, threads, args, shared_bytes=shared_bytes, pdl=pdl)

    def loaded(self, device: torch.device) -> CudaKernel:
        """The kernel for a CUDA device, compiled when first asked for.

        Raises:
            BuildError, KernelMissingError: as ``cuda_module``.
        """
        module = cuda_module(self.program, device_arch(device.index or 0))
        return module.kernel(self.program.kernels[0], self.parameters)


@dataclass(frozen=True)
class Problem:
    """Data of one kind, with the right answer and the least work.

    Attributes:
        name: as the report shows it.
        make: makes one set of buffers from a generator on the device.
        check: says what is wrong with results, or None.
        traffic: the least bytes that any kernel moves.
        operations: what is counted in the roofline plot: additions, counts, elements moved.
        unit: the name of one of them, plural.
        kind: which steps solve it, see ``Step.kinds``.
        pipe: that its FLOPs run on, where it has some: the tensor pipe or the FMA pipe.
        check_apart: as ``check``, for steps whose kernels round what they hand on; None where that
            makes no difference.
    """

    name: str
    make: Callable[[torch.Generator], Buffers]
    check: Check
    traffic: Traffic
    operations: float
    unit: str
    kind: str = ""
    pipe: Wall = Wall.TENSOR_PIPE
    check_apart: Check | None = None


@dataclass(frozen=True)
class Step:
    """One rung.

    Attributes:
        id: e.g. ``transpose.v3``.
        title: a few words.
        lesson: idea, wall and lever.
        run: launches it on the state of a set of buffers; returns the result, or None where that is
            the set's outputs.
        prepare: makes the state of a set of buffers, outside any timing.
        kernels: own kernels that it launches.
        files: files of csrc that it depends on, with what they include.
        peer: the peer that must be there, e.g. ``cub``; empty for own steps.
        operation: the operation whose ``provider`` must have served it; empty elsewhere.
        provider: pinned while it runs.
        capability: the least compute capability.
        kinds: of the problems that it solves; empty for all.
        modules: Python files of fusedops that hold its code, relative to the package.
        recorded: figures of an earlier run, for a step that is shown and never run.
        readings: what is read beside the time, once it is known to be right: name -> value.
        layers: products that it asks the library for, whose kernels can be compiled ahead.
        is_apart: several kernels do what others fuse, see ``Problem.check_apart``.
    """

    id: str
    title: str
    lesson: Lesson
    run: Run
    prepare: Callable[[Buffers], Any] | None = None
    kernels: tuple[LadderKernel, ...] = ()
    files: tuple[str, ...] = ()
    peer: str = ""
    operation: str = ""
    provider: str = "cuda"
    capability: tuple[int, int] = (8, 0)
    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recorded: str = ""
    readings: Callable[[torch.device], dict[str, float]] | None = None
    layers: tuple[Layer, ...] = ()
    is_apart: bool = False

    def solves(self, problem: Problem) -> bool:
        """Whether the step is for problems of that kind."""
        return not self.kinds or problem.kind in self.kinds

    def contender(self, problem: Problem) -> Contender:
        """The step on a problem, as the timer takes it."""
        return Contender(self.id, self.run, self.check_of(problem), prepare=self.prepare)

    def check_of(self, problem: Problem) -> Check:
        """What holds the step's results of a problem to be right."""
        return (self.is_apart and problem.check_apart) or problem.check

    def sources(self, versions: Mapping[str, str]) -> str:
        """Hash of the code behind the step: of its files, and of installed versions where it is not
        all in ``csrc``."""
        files = [pair for file in self.files for pair in cuda_sources(file).files]
        files += [(name, _digest(name)) for name in self.modules]
        text = json.dumps([*files, *(() if self.files else sorted(versions.items()))])
        return hashlib.sha256(f"{self.id} {text}".encode()).hexdigest()[:16]


def _digest(module: str) -> str:
    return hashlib.sha256((PACKAGE_DIR / module).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Finding:
    """What a ladder's rows say together: a table below them on the page.

    Attributes:
        title: heading.
        text: one paragraph, computed from the rows.
        headings, lines: the table.
    """

    title: str
    text: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Ladder:
    """Steps that solve the same problems.

    Attributes:
        name: as the command takes it.
        title: heading.
        intro: the classification: bytes, operations, and what bounds them.
        size: size of the problems in the report.
        problems: makes the problems of a size; tests take a small one.
        steps: from the first to the last.
        findings: what problem -> step's id -> row say together; None for nothing.
        figures: measurements with axes of their own, behind the steps.
    """

    name: str
    title: str
    intro: str
    size: int
    problems: Callable[[int], tuple[Problem, ...]]
    steps: tuple[Step, ...]
    findings: Callable[[Mapping[str, Mapping[str, ResultRow]]], tuple[Finding, ...]] | None = None
    figures: tuple[Figure, ...] = ()

    @property
    def rungs(self) -> tuple[Step | Figure, ...]:
        """Everything with a lesson: the steps, then the figures."""
        return (*self.steps, *self.figures)

    def steps_on(self, problem: str) -> tuple[Step, ...]:
        """The steps that solve the problem of that name."""
        named = [each for each in self.problems(self.size) if each.name == problem]
        return tuple(step for step in self.steps if all(map(step.solves, named)))


def peer_step(
    id: str,
    title: str,
    lesson: Lesson,
    peer: str,
    contender: Callable[[], Contender],
    inputs: Callable[[Buffers], Buffers] = lambda buffers: buffers,
) -> Step:
    """A peer as the reports time it; the ladder has a check of its own.

    Args:
        peer: which peer must be there.
        contender: makes the peer, once, when the step first runs.
        inputs: what the peer takes of the ladder's buffers.
    """
    found = functools.cache(contender)

    def prepare(buffers: Buffers) -> Any:
        make = found().prepare
        taken = inputs(buffers)
        return taken if make is None else make(taken)

    return Step(id, title, lesson, lambda state: found().run(state), prepare=prepare, peer=peer)


def own_step(
    id: str,
    title: str,
    kernel: LadderKernel,
    run: Run,
    prepare: Callable[[Buffers], Any] | None = None,
    capability: tuple[int, int] = (8, 0),
) -> Step:
    """A step whose kernel, and with it the lesson, is in ``csrc/ladders``."""
    return Step(
        id,
        title,
        lesson_of(kernel.file),
        run,
        prepare,
        kernels=(kernel,),
        files=(kernel.file,),
        capability=capability,
    )
