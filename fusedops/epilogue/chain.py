"""``Epilogue``: a frozen chain of nodes with a canonical string.

``Epilogue.parse(str(e)) == e``. The empty chain is written ``none``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fusedops.epilogue.base import Context, ExtraOutput, Node, Operand, rounding_bound, to_dtype
from fusedops.epilogue.spec import forget_when_redefined, require_text, split_chain
from fusedops.errors import ConfigError

__all__ = ["EMPTY", "NO_EPILOGUE", "Epilogue", "forget_parsed"]

EMPTY = "none"


def _require_nodes(nodes: object) -> None:
    if not isinstance(nodes, (tuple, list)):
        raise ConfigError(
            f"Epilogue: nodes is {nodes!r} ({type(nodes).__name__}); accepted: a tuple of nodes, "
            'e.g. Epilogue((Bias(), Act("silu"))), or Epilogue.parse("bias|act(silu)").'
        )
    for node in nodes:
        if not isinstance(node, Node):
            raise ConfigError(
                f"Epilogue: {node!r} ({type(node).__name__}) is no node; accepted are objects of "
                "the node classes of fusedops.epilogue and of your own subclasses of Node. "
                "Epilogue.parse() takes text."
            )


@dataclass(frozen=True)
class Epilogue:
    """What happens to a GEMM's float32 accumulator before its one rounding to the output dtype.

    Compose nodes, or parse the text form::

        Epilogue((Bias(), Act("silu")))
        Epilogue.parse("scale(x_scale,m)|scale(w_scale,n)|bias|act(silu)|residual")

    Raises:
        ConfigError: ``nodes`` is no tuple or list of nodes, the name of an operand or of an extra
            output is used twice, or a node follows a terminal one.
    """

    nodes: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        _require_nodes(self.nodes)
        object.__setattr__(self, "nodes", tuple(self.nodes))
        names = [operand.name for operand in self.operands]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(
                f"epilogue {self}: operand name(s) {', '.join(sorted(repeated))} used twice; name "
                "them apart, e.g. bias(bias2) or scale(w_scale,n)."
            )
        written = [output.name for node in self.nodes for output in node.extra_outputs()]
        repeated = {name for name in written if written.count(name) > 1}
        if repeated:
            raise ConfigError(
                f"epilogue {self}: extra output(s) {', '.join(sorted(repeated))} written twice; "
                "name taps apart, e.g. tap(before) and tap(after), and write a statistic once."
            )
        for node, following in zip(self.nodes, self.nodes[1:], strict=False):
            if node.terminal:
                raise ConfigError(
                    f"epilogue {self}: {following} follows {node}, which must come last."
                )

    def __str__(self) -> str:
        return "|".join(str(node) for node in self.nodes) or EMPTY

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """The chain that ``text`` describes; ConfigError names the part that does not fit."""
        require_text("epilogue", text)  # before the cache, which takes nothing unhashable
        return _parsed(text)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Every operand in the order in which tensors are passed."""
        return tuple(operand for node in self.nodes for operand in node.operands())

    def widths(self, n: int) -> tuple[int, ...]:
        """Columns before each node, and after the last one, for an accumulator of ``n`` columns."""
        widths = [n]
        for node in self.nodes:
            widths.append(node.width(widths[-1]))
        return tuple(widths)

    def operand_widths(self, n: int) -> tuple[int, ...]:
        """For each operand, the columns of the value at the node that reads it."""
        widths = self.widths(n)
        return tuple(
            width for node, width in zip(self.nodes, widths, strict=False) for _ in node.operands()
        )

    def extra_outputs(self, n: int) -> tuple[tuple[ExtraOutput, int], ...]:
        """Every extra output with the columns of the value at its node, in chain order."""
        return tuple(
            (output, width)
            for node, width in zip(self.nodes, self.widths(n), strict=False)
            for output in node.extra_outputs()
        )

    def result_dtype(self, requested: torch.dtype) -> torch.dtype:
        """The main result's dtype: what a node forces, else ``requested``."""
        for node in reversed(self.nodes):
            forced = node.result_dtype()
            if forced is not None:
                return forced
        return requested

    def reference(self, accumulator: Tensor, context: Context) -> Tensor:
        """Run the chain on an (M, N) accumulator in its dtype, then round once to out_dtype."""
        value = accumulator
        for node in self.nodes:
            value = node.reference(value, context)
        return to_dtype(value, context.out_dtype)

    def error_bound(self, accumulator: Tensor, error: Tensor, context: Context) -> Tensor:
        """Elementwise bound of |result - exact| of the main result.

        Args:
            accumulator: exact accumulator (M, N), float64.
            error: bound of the accumulator's own error, float64.
            context: operands; ``outputs`` receives the bounds of the extra outputs.
        """
        value = accumulator
        silent = Context(context.operands, context.out_dtype)
        for node in self.nodes:
            bound = node.bound(value, error, context)
            value = node.reference(value, silent)
            error = bound
        return rounding_bound(value, error, context.out_dtype)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Epilogue:
    if text.strip() == EMPTY:
        return Epilogue()
    if not text.strip():
        raise ConfigError(
            f'epilogue {text!r} is blank; accepted: nodes joined by "|", e.g. '
            f'"bias|act(silu)", or "{EMPTY}".'
        )
    return Epilogue(tuple(Node.parse(part) for part in split_chain(text, "|")))


def forget_parsed() -> None:
    """Read every text anew: needed after taking a node out of the registry."""
    _parsed.cache_clear()


forget_when_redefined(forget_parsed)
NO_EPILOGUE = Epilogue()
