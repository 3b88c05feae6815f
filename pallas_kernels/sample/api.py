"""What the rest of the project calls to choose tokens (step 7).

One implementation serves every platform today: plain XLA operations without a sort. `sample` and
`probabilities` go through the same filter: what a test reads is what is drawn from.
"""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt

from pallas_kernels.sample.reference import is_greedy
from pallas_kernels.sample.xla import filtered_logits, is_sound, sample, top_logprobs

__all__ = ["filtered_logits", "is_greedy", "is_sound", "probabilities", "sample", "top_logprobs"]


def probabilities(kept: jax.Array) -> npt.NDArray[np.float64]:
    """The distribution that filtered logits [R, V] stand for, on the host, in float64.

    float64, because a token that can still be drawn may be less likely than float32 can say.
    """
    weights = np.exp(np.asarray(kept, np.float64))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
