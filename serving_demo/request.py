"""``Request``: a prompt to be continued, and the checks that keep a bad one from the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusedops.errors import ConfigError, ShapeError
from serving_demo.cache import require_fit
from serving_demo.check import require_finite, require_int, require_type

__all__ = ["Request", "check_requests", "require_tokens"]


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    ``Engine.generate`` checks it, because what is accepted depends on the model.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at most so many follow, >= 1.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: with one seed, prompt and temperature, the same tokens are drawn in any batch.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


def require_tokens(name: str, tokens: Any, vocabulary: int) -> None:
    """Raise ConfigError unless ``tokens`` is a tuple or list of ints inside the vocabulary."""
    require_type(name, tokens, (tuple, list), "is a tuple of token ids, which are ints")
    for token in tokens:
        # bool is an int to Python, and a prompt of them a mistake.
        require_type(f"{name}: a token", token, int, "are ints")
        if isinstance(token, bool) or not 0 <= token < vocabulary:
            raise ConfigError(
                f"{name} holds the token {token!r}, outside the vocabulary of {vocabulary:,}; "
                f"accepted are 0 to {vocabulary - 1:,}, as the model's tokenizer gives them."
            )


def check_requests(
    requests: Sequence[Request], max_requests: int, max_positions: int, vocabulary: int
) -> None:
    """Refuse a batch that cannot run.

    Args:
        requests: the batch.
        max_requests: most requests in one.
        max_positions: positions that the cache holds for a request.
        vocabulary: the model's tokens.

    Raises:
        ShapeError: a prompt is empty, or does not fit into the cache with what may follow.
        ConfigError: too many requests or none, or a value of another type or out of range.
    """
    require_type("requests", requests, (tuple, list), "is a list of Requests")
    if not 1 <= len(requests) <= max_requests:
        raise ConfigError(
            f"{len(requests)} prompts are asked for at once; accepted are 1 to {max_requests}, "
            "what this engine was made for (max_requests)."
        )
    for index, request in enumerate(requests):
        require_type(f"request {index + 1}", request, Request, "is a Request")
        name = f"prompt {index + 1}"
        require_tokens(name, request.prompt, vocabulary)
        if not request.prompt:
            raise ShapeError(f"{name} is empty; accepted are one token or more.")
        require_int(f"{name}: max_new_tokens", request.max_new_tokens, 1)
        require_finite(f"{name}: temperature", request.temperature, 0)
        require_int(f"{name}: seed", request.seed)
        require_fit(index, len(request.prompt), request.max_new_tokens, max_positions)
