"""What the rest of the project calls to choose tokens (step 7).

    choice = dispatch.choose("sample", platform=..., vocab_size=...)
    tokens, ok = sample(logits, temperature, ..., implementation=choice)

`sample` and `filtered_logits` go through the same filter: what a test reads is what is drawn from.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from pallas_kernels.dispatch import Choice
from pallas_kernels.sample.reference import is_greedy

__all__ = ["filtered_logits", "is_greedy", "is_sound", "probabilities", "sample", "top_logprobs"]

#: Works on every platform; what `dispatch` chooses unless it is told otherwise.
DEFAULT = "xla"


def _module(implementation: Choice | str) -> Any:
    name = implementation.implementation if isinstance(implementation, Choice) else implementation
    return importlib.import_module(f"pallas_kernels.sample.{name}")


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    implementation: Choice | str = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """One token per row [R] int32 and ok [R] bool; see `reference.sample`."""
    result: tuple[jax.Array, jax.Array] = _module(implementation).sample(
        logits, temperature, top_k, top_p, min_p, seed, position
    )
    return result


def filtered_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    implementation: Choice | str = DEFAULT,
) -> jax.Array:
    """Scaled logits [R, V] float32, -inf outside the support; see `reference.filtered_logits`."""
    kept: jax.Array = _module(implementation).filtered_logits(
        logits, temperature, top_k, top_p, min_p
    )
    return kept


def is_sound(logits: jax.Array, *, implementation: Choice | str = DEFAULT) -> jax.Array:
    """[R] bool: rows of logits [R, V] without NaN or +inf and with something besides -inf."""
    sound: jax.Array = _module(implementation).is_sound(logits)
    return sound


def top_logprobs(
    logits: jax.Array, tokens: jax.Array, count: int, *, implementation: Choice | str = DEFAULT
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of `tokens` and of the `count` likeliest; see `reference.top_logprobs`."""
    result: tuple[jax.Array, jax.Array, jax.Array] = _module(implementation).top_logprobs(
        logits, tokens, count
    )
    return result


def probabilities(kept: jax.Array) -> npt.NDArray[np.float64]:
    """The distribution that filtered logits [R, V] stand for, on the host, in float64.

    float64, because a token that can still be drawn may be less likely than float32 can say.
    """
    weights = np.exp(np.asarray(kept, np.float64))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
