"""Providers: who runs an operation, in which order they are asked, and why one was passed over.

An operation has implementations, each under a provider's name. Selection asks them in
``PROVIDER_ORDER`` and takes the first whose ``Support`` is ok. Nothing falls back silently: the
reasons of those passed over are kept for ``explain()``, and strict mode turns them into an error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache

import torch

from fusedops.check import require_bool
from fusedops.errors import ConfigError, UnsupportedError

__all__ = [
    "PROVIDER_ORDER",
    "SUPPORTED",
    "Policy",
    "Support",
    "Usage",
    "choose",
    "current_policy",
    "elsewhere",
    "not_applicable",
    "unpinned",
    "unsupported",
    "use_provider",
]

PROVIDER_ORDER = ("cutlass", "cuda", "flashinfer", "cublas", "cutlass_sm80", "torch", "reference")
"""Every provider, fastest first. ``reference`` runs on any device and is asked last.

``cutlass_sm80`` reaches 0.3 to 0.9 of cuBLAS's speed on an H200, so it is asked after it: it serves
whoever pins it, and what cuBLAS cannot."""


@dataclass(frozen=True)
class Support:
    """A provider's answer to a request: ``ok``, or the ``reason`` why it cannot serve it.

    ``applicable`` is False where the provider was never meant for the request (a CUDA provider and
    a CPU tensor): strict mode does not count that as falling back.
    """

    ok: bool
    reason: str = ""
    applicable: bool = True


SUPPORTED = Support(True)


def unsupported(reason: str) -> Support:
    """The answer of a provider that cannot serve a request, with the reason for the user."""
    return Support(False, reason)


def not_applicable(reason: str) -> Support:
    """The answer of a provider that was never meant for such a request (another device)."""
    return Support(False, reason, applicable=False)


@cache
def elsewhere(device: torch.device) -> Support:
    """The answer of a provider of CUDA kernels to a call on another kind of device."""
    return not_applicable(f"runs on CUDA tensors, got one on {device}")


@dataclass
class Usage:
    """How often each (operation, provider) ran under one ``use_provider`` block."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, op: str, provider: str) -> int:
        """Number of calls of ``op`` that ``provider`` served inside the block."""
        return self.calls[op, provider]


@dataclass(frozen=True)
class Policy:
    """Which provider the caller wants.

    Attributes:
        pinned: the provider to ask first; None keeps ``PROVIDER_ORDER``.
        strict: raise instead of going on to the next provider when the first one asked says no.
        usage: where calls are counted; None outside a ``use_provider`` block.
    """

    pinned: str | None = None
    strict: bool = False
    usage: Usage | None = field(default=None, compare=False)

    def order(self) -> tuple[str, ...]:
        """Providers in the order in which they are asked."""
        return _order(self.pinned)


@cache
def _order(pinned: str | None) -> tuple[str, ...]:
    if pinned is None:
        return PROVIDER_ORDER
    return (pinned, *(name for name in PROVIDER_ORDER if name != pinned))


def _checked_name(name: str, origin: str) -> str:
    if name not in PROVIDER_ORDER:
        raise ConfigError(
            f"unknown provider {name!r}; accepted are {', '.join(PROVIDER_ORDER)}. Change {origin}."
        )
    return name


def _policy_from_environment() -> Policy:
    name = os.environ.get("FUSEDOPS_PROVIDER") or None
    if name is not None:
        _checked_name(name, "the environment variable FUSEDOPS_PROVIDER")
    return Policy(pinned=name, strict=os.environ.get("FUSEDOPS_STRICT", "0") not in ("", "0"))


_policy: ContextVar[Policy | None] = ContextVar("fusedops_policy", default=None)
_environment_policy: Policy | None = None


def current_policy() -> Policy:
    """The policy in force here: the innermost ``use_provider`` block, else the environment's."""
    policy = _policy.get()
    if policy is not None:
        return policy
    global _environment_policy
    if _environment_policy is None:
        _environment_policy = _policy_from_environment()
    return _environment_policy


@contextmanager
def unpinned() -> Iterator[None]:
    """Let any provider serve what an operation itself calls, whatever was pinned for it."""
    token = _policy.set(Policy(usage=current_policy().usage))
    try:
        yield
    finally:
        _policy.reset(token)


@contextmanager
def use_provider(name: str, *, strict: bool = True) -> Iterator[Usage]:
    """Pin a provider for the calls made inside the block (and in this thread only).

    Args:
        name: ``cutlass``, ``cuda``, ``flashinfer``, ``cublas``, ``cutlass_sm80``, ``torch`` or
            ``reference``: the order in which they are asked otherwise.
        strict: raise ``UnsupportedError`` where the provider cannot serve a call; with False the
            provider is asked first and the others after it.

    Yields:
        a ``Usage`` that counts what ran, so that a test can assert it.

    Raises:
        ConfigError: the name is no provider's, or ``strict`` no bool.
        UnsupportedError: raised by the calls inside the block, see ``strict``.
    """
    require_bool("use_provider", strict=strict)
    usage = Usage()
    policy = Policy(_checked_name(name, "the argument of use_provider()"), strict, usage)
    token = _policy.set(policy)
    try:
        yield usage
    finally:
        _policy.reset(token)


def choose(op: str, ask: Callable[[str], Support | None], policy: Policy) -> str:
    """The name of the provider that serves ``op``.

    Args:
        op: the operation, for messages.
        ask: a provider's answer by name; None where it has no implementation. Providers after the
            one that serves are not asked.
        policy: the caller's wish.

    Raises:
        UnsupportedError: nobody serves it, or strict mode forbids going past the first one asked.
    """
    reasons: dict[str, str] = {}
    passed_over: str | None = None
    for name in policy.order():
        answer = ask(name)
        if answer is None and name != policy.pinned:
            continue
        if answer is None:
            answer = unsupported(f"has no implementation of {op}")
        if answer.ok and passed_over is None:
            return name
        if answer.ok:
            raise UnsupportedError(
                f"{op}: provider {passed_over!r} cannot serve this call and strict mode forbids "
                f"going on to {name!r}; pin another provider with fusedops.use_provider() or leave "
                "strict mode",
                reasons,
            )
        reasons[name] = answer.reason
        if policy.strict and (answer.applicable or name == policy.pinned):
            passed_over = passed_over or name
    raise UnsupportedError(f"{op}: no provider serves this call", reasons)
