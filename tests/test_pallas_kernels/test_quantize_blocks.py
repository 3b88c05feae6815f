"""Weights that stood in blocks of few bits come back exactly in 8 bits; others as near as before."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.quantized_matmul.api import dequantize, quantize
from pallas_kernels.quantized_matmul.scheme import named_scheme

SCHEME = named_scheme("int8_group32")


def blocks(lowest: int) -> np.ndarray:
    """Rows of blocks as GGUF stores them: a float16 scale times whole numbers, one the lowest."""
    rng = np.random.default_rng(-lowest)
    numbers = rng.integers(lowest, -lowest, (24, 5, 32)).astype(np.float32)
    numbers[..., 3] = lowest
    scales = (rng.uniform(0.5, 2, (24, 5, 1)) * rng.choice([-1e-3, 3e-2], (24, 5, 1))).astype(
        np.float16
    )
    return (numbers * scales.astype(np.float32)).reshape(24, 160)


@pytest.mark.parametrize("lowest", [-8, -16, -127])
def test_symmetric_blocks_are_exact(lowest: int) -> None:
    weight = blocks(lowest)
    found = np.asarray(dequantize(quantize(weight, SCHEME), SCHEME))
    limit = 2**-11 * np.abs(weight).max() if lowest == -127 else 0.0  # a scale's last digit
    assert np.abs(found - weight).max() <= limit


def test_other_groups_use_all_of_eight_bits() -> None:
    weight = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    values = np.asarray(quantize(weight, SCHEME).values)
    assert (np.abs(values.reshape(16, 2, 32)).max(-1) == 127).all()
