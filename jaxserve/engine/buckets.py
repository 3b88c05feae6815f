"""The fixed shapes that steps are padded to (between steps 5 and 6)."""

from __future__ import annotations

import dataclasses

#: Query tokens per step. Prompts' chunks are cut so that they fill a bucket, so doubling will do.
_SIZES = tuple(2**power for power in range(15))
#: Answers alone take any number of tokens up to that of the slots: there the steps are finer.
_FINE = (24, 48, 96, 192, 384)
_ROUND = 8
#: Rows that sampling is compiled for: a `sample` program takes the compiler longer than thirty
#: layers, so there are fewer of them than buckets.
_SAMPLED = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One compiled shape: T query tokens that belong to at most R rows (sequences)."""

    tokens: int
    rows: int

    @property
    def sampled(self) -> int:
        """Rows of its `sample` program; logits are padded to so many."""
        return next((size for size in _SAMPLED if size >= self.rows), self.rows)


def make_buckets(max_step_tokens: int, max_num_seqs: int) -> tuple[Bucket, ...]:
    """All shapes, smallest first. The largest holds max_step_tokens, rounded up to a multiple of 8."""
    largest = -(-max_step_tokens // _ROUND) * _ROUND if max_step_tokens > 1 else 1
    fine = [size for size in _FINE if size * 2 // 3 < max_num_seqs]
    sizes = [size for size in sorted((*_SIZES, *fine)) if size < largest] + [largest]
    return tuple(Bucket(tokens=size, rows=min(size, max_num_seqs)) for size in sizes)


def choose_bucket(buckets: tuple[Bucket, ...], num_tokens: int, num_rows: int) -> Bucket:
    """The smallest shape that holds a step."""
    for bucket in buckets:
        if bucket.tokens >= num_tokens and bucket.rows >= num_rows:
            return bucket
    raise AssertionError(f"no bucket holds {num_tokens} tokens of {num_rows} rows: {buckets}")
