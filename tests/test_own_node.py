"""The node that CONTRIBUTING.md shows works as it stands, and half-made classes are refused."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.epilogue import Bias, Context, Epilogue, Node
from fusedops.epilogue.chain import forget_parsed
from fusedops.errors import ConfigError, UnsupportedError
from fusedops.problem import GemmSpec

CONTRIBUTING = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"


@pytest.fixture(autouse=True)
def registry_as_before() -> Iterator[None]:
    known = dict(Node.registry)
    yield
    Node.registry.clear()
    Node.registry.update(known)
    forget_parsed()
    GemmSpec.parse.cache_clear()


@pytest.fixture
def example(tmp_path: Path) -> Iterator[ModuleType]:
    """The code block of the passage, run as a module of its own."""
    passage = CONTRIBUTING.read_text(encoding="utf-8").split("## Adding an epilogue node")[1]
    blocks = re.findall(r"```python\n(.*?)```", passage.split("\n## ")[0], re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path / "own_node.py"
    path.write_text(blocks[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own_node", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own_node", module)
        spec.loader.exec_module(module)
        yield module


def clipped(example: ModuleType) -> Tensor:
    product = example.x.double() @ example.w.double().T
    edge = 2.0 * example.factor.double()
    return torch.minimum(torch.maximum(product, -edge), edge)


def test_the_documented_node_computes_what_it_says(example: ModuleType) -> None:
    torch.testing.assert_close(example.y.double(), clipped(example).relu(), rtol=1e-5, atol=1e-5)
    node = example.Clip(2)
    assert str(node) == "clip(2.0)"
    assert Epilogue.parse("clip(2.0)") == Epilogue((node,))
    with pytest.raises(ConfigError, match=r"clip: limit is nan; accepted: a number"):
        example.Clip(float("nan"))


class FakeMath:
    def maximum(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.maximum(left, right)


@dataclass
class FakeTile:
    """A tile whose register values are one tensor."""

    value: Tensor
    operands: dict[str, Tensor]
    math = FakeMath()

    def combine(self, operand: str, function: Callable[[Any, Any], Any]) -> FakeTile:
        return FakeTile(function(self.value, self.operands[operand]), self.operands)


def test_its_emission_and_its_bound_follow_its_reference(example: ModuleType) -> None:
    node, value = example.Clip(2.0), example.x @ example.w.T
    tile = node.emit(FakeTile(value, {"factor": example.factor}))
    context = Context({"factor": example.factor.double()[None]}, torch.float32)
    exact = node.reference(value.double(), context)
    error = (tile.value.double() - exact).abs()
    bound = node.bound(value.double(), torch.zeros_like(exact), context)
    assert (error <= bound).all()
    assert (exact != value.double()).any()


def test_a_class_that_is_no_dataclass_is_refused_when_it_is_used() -> None:
    class Plain(Node):
        spec_name = "plain_for_test"
        factor: float = 2.0

    for use in (Plain, lambda: Epilogue.parse("plain_for_test")):
        with pytest.raises(
            ConfigError, match=r"Plain is no dataclass; .*@dataclass\(frozen=True\)"
        ):
            use()


def test_a_class_without_a_name_of_its_own_is_refused_when_it_is_used() -> None:
    @dataclass(frozen=True)
    class Unnamed(Node):
        factor: float = 2.0

    @dataclass(frozen=True)
    class Derived(Bias):  # its text would say "bias", which is another class
        def reference(self, value: Tensor, context: Context) -> Tensor:
            return value

    for cls in (Unnamed, Derived, Node):
        with pytest.raises(ConfigError, match=f"{cls.__name__} has no spec_name of its own"):
            cls()


def test_fields_of_other_types_are_refused_when_the_class_is_used() -> None:
    @dataclass(frozen=True)
    class Flagged(Node):
        spec_name: ClassVar[str] = "flagged_for_test"
        flag: bool = True  # bool("False") is True: its text could not be read back

    @dataclass(frozen=True)
    class NameAsField(Node):
        spec_name: str = "name_as_field_for_test"

    for cls, name in ((Flagged, "flag"), (NameAsField, "spec_name")):
        with pytest.raises(ConfigError, match=f"field '{name}' is of type .*str, int and float"):
            cls()


@pytest.mark.parametrize("name", [3, "Upper", "with space", "a|b"])
def test_a_name_that_no_text_can_hold_is_refused_at_definition(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"spec_name .* accepted is text that matches"):
        type("Misnamed", (Node,), {"spec_name": name})


def test_a_class_without_a_reference_says_what_to_add() -> None:
    @dataclass(frozen=True)
    class Empty(Node):
        spec_name: ClassVar[str] = "empty_for_test"

    with pytest.raises(UnsupportedError, match=r"Empty defines no reference\(self, value, context"):
        fusedops.gemm(torch.ones(1, 2), torch.ones(2, 2), Epilogue((Empty(),)))
