"""``Op``: one object per operation, from which registration, fake and provider dispatch follow.

``torch.library.Library`` define/impl/fake is used instead of the ``custom_op`` decorator because a
call through it costs a third as much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusedops.check import require_argument_types, require_updatable
from fusedops.errors import FusedOpsError, UnsupportedError
from fusedops.providers.base import (
    SUPPORTED,
    Policy,
    Support,
    choose,
    current_policy,
    not_applicable,
)

__all__ = ["LIBRARY", "OPS", "Op", "entry", "ignore_autocast", "refuse_grad", "refuse_layouts"]

LIBRARY = torch.library.Library("fusedops", "DEF")
"""The one library object; it must live as long as the process, or torch forgets the operators."""

OPS: dict[str, Op] = {}
"""Every operation by name."""


def refuse_grad(op: str, args: tuple[Any, ...]) -> None:
    """Raise UnsupportedError if a gradient would be asked of ``op``: fusedops is inference only."""
    if not torch.is_grad_enabled():
        return
    for arg in args:
        tensors = arg if isinstance(arg, (list, tuple)) else (arg,)
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            raise UnsupportedError(
                f"fusedops::{op} is inference only, but an input requires grad while grad mode is "
                "on; call it under torch.inference_mode() or torch.no_grad(), or detach the input"
            )


_EXACT_TYPES = {"int": int, "bool": bool, "ScalarType": torch.dtype}
"""Types in a schema for which torch takes more than it should, and what nearly every caller passes;
something else gets a closer look."""


def entry(name: str) -> Callable[..., Any]:
    """``fusedops::<name>``, once defined, as its public Python function calls it.

    Arguments of the wrong type raise DTypeError or ConfigError in place of torch's own error, also
    those that torch would take: a bool in the place of a number and the other way round, a dtype or
    a tensor for an integer, and an integer for a dtype.
    """
    op = getattr(torch.ops.fusedops, name).default
    public = OPS[name].public
    kinds = [str(argument.real_type) for argument in op._schema.arguments]
    floats = tuple(i for i, kind in enumerate(kinds) if kind == "float")
    exact = tuple((i, _EXACT_TYPES[kind]) for i, kind in enumerate(kinds) if kind in _EXACT_TYPES)

    def call(*args: Any) -> Any:
        for i in floats:
            if isinstance(args[i], bool):
                require_argument_types(public, op._schema, args)
        for i, kind in exact:
            if type(args[i]) is not kind:
                require_argument_types(public, op._schema, args)
        try:
            return op(*args)
        except (AttributeError, RuntimeError, TypeError) as error:
            if not isinstance(error, FusedOpsError):
                require_argument_types(public, op._schema, args)
            raise

    return call


_OTHER_LAYOUTS = (
    *("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU"),
    *("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"),
)
"""Dispatch keys of tensors that are not dense."""


def refuse_layouts(name: str, public: str | None = None) -> None:
    """Make ``fusedops::<name>``, once defined, refuse sparse and nested tensors (LayoutError).

    Registered for the dispatch keys that only such tensors have, so that other calls do not pay.
    Errors name ``public``, or the operator.
    """
    op = public or name
    schema = getattr(torch.ops.fusedops, name).default._schema

    def refuse(*args: Any) -> None:
        require_argument_types(op, schema, args)
        raise UnsupportedError(f"{op}: accepted are dense tensors; call to_dense() on each.")

    for key in _OTHER_LAYOUTS:
        LIBRARY.impl(name, refuse, key)


def _run_without_autocast(op: Callable[..., Any], device_type: str, *args: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return op(*args)


def ignore_autocast(name: str) -> None:
    """Make ``fusedops::<name>``, once defined, compute the same under ``torch.autocast``.

    Its dtypes follow its arguments, and its float32 parts are documented; autocast would turn the
    products inside into half precision. Registered for the dispatch keys that only autocast turns
    on, so that other calls do not pay for it.
    """
    op = getattr(torch.ops.fusedops, name).default
    for device_type in ("cpu", "cuda"):
        run = partial(_run_without_autocast, op, device_type)
        LIBRARY.impl(name, run, f"Autocast{device_type.upper()}")


def _any_device(*_args: Any) -> Support:
    return SUPPORTED


def _cuda_tensors(*args: Any) -> Support:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.is_cuda:
                return SUPPORTED
            return not_applicable(f"runs on CUDA tensors, got one on {arg.device}")
    return not_applicable("runs on CUDA tensors, got none")


_SIGNATURE_LIMIT = 4096


class Op:
    """An operation ``fusedops::<name>``.

    Args:
        schema: torch schema without the namespace and without defaults (the public Python function
            holds the defaults), a tensor first, e.g. ``"rms_norm(Tensor x, Tensor weight, float
            eps) -> Tensor"``.
        check: called with the arguments before anything else; raises on what is not accepted. It
            also runs under FakeTensor, and is skipped for arguments like earlier ones, so it may
            look at shapes, strides, dtypes, devices and plain values only.
        fake: returns empty results of the right shape, stride, dtype and device.
        reference: the vectorised torch implementation; right on every device, also inside a CUDA
            graph capture unless ``check_values`` says otherwise.
        check_values: further checks that read tensor values; run on CPU tensors only, because on a
            GPU they would synchronise.
        check_aliases: further checks, of whether arguments share memory; skipped for arguments that
            lie where earlier ones did.
        separate: called behind every check; returns the arguments to run with, where some that are
            only read may have to be copied because they share memory with others; skipped likewise.
        public: the function that errors name, if it is called otherwise.
    """

    def __init__(
        self,
        schema: str,
        *,
        check: Callable[..., None],
        fake: Callable[..., Any],
        reference: Callable[..., Any],
        check_values: Callable[..., None] | None = None,
        check_aliases: Callable[..., None] | None = None,
        separate: Callable[..., tuple[Any, ...]] | None = None,
        public: str | None = None,
    ) -> None:
        self.name = schema.split("(", 1)[0].strip()
        self.public = public or self.name
        self.check = check
        self.check_values = check_values
        self.check_aliases = check_aliases
        self._separate = separate
        self._accepted: set[tuple[Any, ...]] = set()
        self._apart: set[tuple[Any, ...] | None] = set()
        self._fake = fake
        self._implementations: dict[str, tuple[Callable[..., Support], Callable[..., Any]]] = {}
        self._first: dict[str | None, str | None] = {}
        self.add("reference", _any_device, reference)
        self.add("torch", _cuda_tensors, reference)
        LIBRARY.define(schema)
        arguments = getattr(torch.ops.fusedops, self.name).default._schema.arguments
        self._written = tuple((i, a.name) for i, a in enumerate(arguments) if a.is_write)
        kinds = [str(a.type) for a in arguments]
        self._tensors = tuple(i for i, kind in enumerate(kinds) if "Tensor" in kind)
        self._values = tuple(i for i, kind in enumerate(kinds) if "Tensor" not in kind)
        LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusedops::{self.name}", self._run_fake, lib=LIBRARY)
        ignore_autocast(self.name)
        refuse_layouts(self.name, self.public)
        OPS[self.name] = self

    def add(self, provider: str, supports: Callable[..., Support], run: Callable[..., Any]) -> None:
        """Register an implementation; ``supports`` and ``run`` take the operation's arguments."""
        self._implementations[provider] = (supports, run)
        self._first.clear()

    @property
    def providers(self) -> tuple[str, ...]:
        """Providers with an implementation, in the order in which they were registered."""
        return tuple(self._implementations)

    def answers(self, *args: Any) -> dict[str, Support]:
        """Each registered provider's answer to a call with these arguments."""
        return {name: supports(*args) for name, (supports, _) in self._implementations.items()}

    def select(self, policy: Policy, *args: Any) -> str:
        """The provider that serves a call with these arguments under ``policy``."""
        pinned = policy.pinned
        if pinned not in self._first:
            asked = [
                name for name in policy.order() if name in self._implementations or name == pinned
            ]
            self._first[pinned] = asked[0] if asked[0] in self._implementations else None
        first = self._first[pinned]
        # Whoever is asked first serves nearly every call; reasons are for the others.
        if first is not None and self._implementations[first][0](*args).ok:
            return first

        def ask(provider: str) -> Support | None:
            found = self._implementations.get(provider)
            return None if found is None else found[0](*args)

        return choose(self.name, ask, policy)

    def _check_new(self, args: tuple[Any, ...], signature: tuple[Any, ...]) -> None:
        try:
            self.check(*args)
        except AttributeError:  # torch lets None through in the place of a tensor
            schema = getattr(torch.ops.fusedops, self.name).default._schema
            require_argument_types(self.public, schema, args)
            raise
        if len(self._accepted) >= _SIGNATURE_LIMIT:
            self._accepted.clear()
        self._accepted.add(signature)

    def _placed(self, signature: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """All that aliasing depends on: where which bytes lie; None where none is asked about."""
        if self.check_aliases is None and self._separate is None:
            return None
        addresses = [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
        return (signature, *addresses)

    def _made_apart(self, placed: tuple[Any, ...] | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments to run with; remembers the places of those that are apart as they are.

        A decode step has the same tensors, or the allocator's same addresses, again and again.
        """
        result = args if self._separate is None else self._separate(*args)
        if all(new is old for new, old in zip(result, args, strict=True)):
            if len(self._apart) >= _SIGNATURE_LIMIT:
                self._apart.clear()
            self._apart.add(placed)
        return result

    def _signature(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Everything that a check may look at, as cheap reads: a tenth of the checks' own time.

        A decode step calls each operation with the same signature in every layer, between products
        that sweep the caches, where the checks' many small functions cost more than their work.
        """
        key: list[Any] = []
        for i in self._tensors:
            arg = args[i]
            # Beside a tensor's layout, so that None in its place is another signature.
            key += (None,) if arg is None else (arg.shape, arg.stride(), arg.dtype, arg.device)
        for i in self._values:
            arg = args[i]
            key.append(tuple(arg) if isinstance(arg, list) else arg)
        return tuple(key)

    def _run(self, *args: Any) -> Any:
        if torch.is_grad_enabled():
            for i in self._tensors:
                if args[i] is not None and args[i].requires_grad:
                    refuse_grad(self.public, args)
        signature = self._signature(args)
        if signature not in self._accepted:
            self._check_new(args, signature)
        for i, name in self._written:
            require_updatable(self.name, name, args[i])
        placed = self._placed(signature, args)
        is_apart = placed is None or placed in self._apart
        if not is_apart and self.check_aliases is not None:
            self.check_aliases(*args)
        on_cpu = args[0].is_cpu
        if on_cpu and self.check_values is not None:
            self.check_values(*args)
        if not is_apart:
            args = self._made_apart(placed, args)
        policy = current_policy()
        if on_cpu and policy.pinned is None:
            # Every other provider is for GPUs; asking each costs more than a small call's work.
            provider = "reference"
        else:
            provider = self.select(policy, *args)
        if policy.usage is not None:
            policy.usage.calls[self.name, provider] += 1
        return self._implementations[provider][1](*args)

    def _run_fake(self, *args: Any) -> Any:
        self.check(*args)
        return self._fake(*args)
