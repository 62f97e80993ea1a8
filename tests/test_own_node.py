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
from fusedops.epilogue import Bias, Context, Epilogue, ExtraOutput, Node, Operand
from fusedops.epilogue.chain import forget_parsed
from fusedops.errors import ConfigError, UnsupportedError
from fusedops.gemm import clear_plans
from fusedops.ops.gemm_arguments import cached_spec
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
    cached_spec.cache_clear()
    clear_plans()


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


REDEFINED = """
from dataclasses import dataclass
from typing import ClassVar
from fusedops.epilogue import Node

@dataclass(frozen=True)
class Times(Node):
    spec_name: ClassVar[str] = "times_for_test"

    def reference(self, value, context):
        return value * FACTOR
"""


def test_a_node_defined_anew_has_its_new_math() -> None:
    one = torch.ones(1, 1)
    for factor in (2, 3):
        names = {"__name__": "__main__"}
        cell = REDEFINED.replace("FACTOR", str(factor))
        exec(compile(cell, "cell", "exec", dont_inherit=True), names)  # as a notebook runs it again
        by_class = fusedops.gemm(one, one, Epilogue((names["Times"](),)))  # type: ignore[operator]
        assert by_class.item() == factor
        assert fusedops.gemm(one, one, "times_for_test").item() == factor


def define(reference: Any, name: str = "faulty_for_test", **members: Any) -> Epilogue:
    """A chain of one node whose class has these members."""
    body = {"spec_name": name, "reference": reference, "__module__": __name__, **members}
    return Epilogue((dataclass(frozen=True)(type("Faulty", (Node,), body))(),))


def test_a_reference_that_works_in_place_changes_nothing_else() -> None:
    def reference(self: Node, value: Tensor, context: Context) -> Tensor:
        factor = context.read("factor", value)
        context.outputs.append(value)
        return value.mul_(factor.add_(1.0))

    def outputs(self: Node) -> tuple[ExtraOutput, ...]:
        return (ExtraOutput("seen", None, lambda m, n, t, d: torch.empty(*m, n, dtype=t)),)

    def operands(self: Node) -> tuple[Operand, ...]:
        return (Operand("factor", "n"),)

    define(reference, operands=operands, extra_outputs=outputs)
    x, w, factor = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    before = factor.clone()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            chain = "tap(before)|faulty_for_test|tap(after)"
            main, tapped, seen, after = fusedops.gemm(x, w, chain, {"factor": factor})
        torch.testing.assert_close(tapped, x @ w.T)
        torch.testing.assert_close(main, (x @ w.T) * (before + 1.0))
        assert torch.equal(seen, main)
        assert torch.equal(after, main)
        assert torch.equal(factor, before)
        assert len({t.data_ptr() for t in (main, tapped, seen, after)}) == 4


def test_a_result_of_any_layout_is_taken() -> None:
    chain = define(lambda self, value, context: value.t().contiguous().t())
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    result = fusedops.gemm(x, w, chain)
    torch.testing.assert_close(result, x @ w.T)
    assert result.is_contiguous()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (lambda self, value, context: None, "returned None"),
        (lambda self, value, context: value[:, :1], r"returned float32 \(2, 1\)"),
        (lambda self, value, context: value.double(), "returned float64"),
        (lambda self, value, context: context.read("nope", value), "'nope'.*declared: none"),
        (lambda self, value, context: context.operands["nope"], "'nope'.*declared: none"),
        (lambda self, value, context: context.outputs.append(value) or value, "wrote 1 extra"),
    ],
)
def test_a_faulty_reference_is_an_error_that_names_the_node(reference: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"faulty_for_test: its reference.*{words}"):
        fusedops.gemm(torch.ones(2, 3), torch.ones(5, 3), define(reference))


def test_an_extra_output_of_another_shape_is_an_error_that_names_it() -> None:
    def outputs(self: Node) -> tuple[ExtraOutput, ...]:
        return (ExtraOutput("seen", None, lambda m, n, t, d: torch.empty(*m, n, dtype=t)),)

    chain = define(
        lambda self, value, context: context.outputs.append(value[0]) or value,
        extra_outputs=outputs,
    )
    with pytest.raises(ConfigError, match=r"wrote into 'seen' float32 \(5,\).*float32 \(2, 5\)"):
        fusedops.gemm(torch.ones(2, 3), torch.ones(5, 3), chain)


def test_a_bound_that_reads_an_undeclared_operand_says_so() -> None:
    with pytest.raises(ConfigError, match="'nope' is read but not declared; declared: bias"):
        Context({"bias": torch.ones(1)}, torch.float32).read("nope", torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bias", "rows"), "operand 'bias': axis is 'rows'; accepted are scalar, m, n, mn"),
        (("b-1", "n"), "operand name 'b-1'; accepted: an identifier"),
        ((3, "n"), "operand name 3"),
        (("bias", "n", torch.float32), "dtypes is torch.float32; accepted: a tuple"),
        (("bias", "n", ()), r"dtypes is \(\)"),
        (("bias", "n", (torch.float32,), "no"), "optional is 'no'"),
    ],
)
def test_an_operand_that_is_none_is_refused_at_definition(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Operand(*arguments)


def test_an_extra_output_that_is_none_is_refused_at_definition() -> None:
    with pytest.raises(ConfigError, match="extra output name '1'"):
        ExtraOutput("1", None, torch.empty)
    with pytest.raises(ConfigError, match="'seen': dtypes is"):
        ExtraOutput("seen", "f32", torch.empty)  # type: ignore[arg-type]


def test_a_class_whose_decorator_failed_takes_no_name() -> None:
    def make(scale: float, decorate: Any) -> None:
        def reference(self: Node, value: Tensor, context: Context) -> Tensor:
            return value * scale

        body = {"spec_name": "scaled_for_test", "reference": reference, "__module__": __name__}
        decorate(type(f"Scaled{scale:.0f}", (Node,), body))

    for _ in range(2):
        with pytest.raises(TypeError, match="cannot inherit non-frozen"):
            make(3.0, dataclass)
    with pytest.raises(ConfigError) as caught:
        Epilogue.parse("unknown_for_test")
    assert "scaled_for_test" not in str(caught.value)
    make(2.0, dataclass(frozen=True))
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        make(2.0, dataclass)
    ones = torch.ones(1, 1)
    assert fusedops.gemm(ones, ones, "scaled_for_test").item() == 2.0
