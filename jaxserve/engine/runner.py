"""Turns a step's plan into the device's inputs, and its result into tokens (steps 6 and 7).

`dispatch` fills two packed arrays from a plan and hands them to the bucket's programs
(`step_device.py`); `read` is the only place in which the host waits for the device. Knows arrays
and slots, no policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve.engine.buckets import Bucket, choose_bucket
from jaxserve.engine.engine import SampledRow
from jaxserve.engine.programs import StepShape, forward_layout, sample_layout
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_device import Device
from jaxserve.engine.step_plan import ScheduledRow, StepPlan
from jaxserve.engine.step_profile import StepProfile
from jaxserve.request import GenerationRequest, TokenLogprobs
from jaxserve.sampling.arrays import RowEntry, RowTemplate, row_arrays, row_template
from jaxserve.sampling.limits import SamplingLimits, check_limits
from jaxserve.sampling.sampler import SampleResult
from jaxserve.sampling.state import MASKS_AT_ONCE, needs_reset, slot_reset
from jaxserve.structured.matcher import Matcher


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepHandle:
    """A step that was dispatched: its plan and the arrays that will hold its tokens."""

    plan: StepPlan
    result: SampleResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerShape:
    """Fixed sizes of one engine. buckets: those that are compiled, from small to large."""

    buckets: tuple[Bucket, ...]
    vocab_size: int
    max_num_seqs: int
    pages_per_sequence: int
    eos_ids: frozenset[int]
    limits: SamplingLimits


class DeviceRunner:
    """Turns plans into packed inputs and results into rows; see `engine.StepRunner`."""

    def __init__(self, device: Device, shape: RunnerShape) -> None:
        self.vocab_size = shape.vocab_size
        self._device = device
        self._shape = shape
        self._layouts = {
            bucket: forward_layout(
                StepShape(bucket=bucket, pages_per_sequence=shape.pages_per_sequence)
            )
            for bucket in shape.buckets
        }
        self._sample_layouts = {
            rows: sample_layout(rows) for rows in {b.sampled for b in shape.buckets}
        }
        self._templates: dict[int, RowTemplate] = {}
        self._tables = np.zeros((shape.max_num_seqs, shape.pages_per_sequence), np.int32)
        self._num_pages = [0] * shape.max_num_seqs

    def check_request(self, request: GenerationRequest) -> None:
        """Raises RequestError where the request exceeds the sampler's arrays."""
        check_limits(request.sampling, self._shape.limits)

    def bucket_tokens(self, plan: StepPlan) -> int:
        """T of the bucket that the plan is padded to."""
        return self._bucket(plan).tokens

    def reset(self) -> None:
        """New pages and sampling state, all empty."""
        self._device.renew()

    def profile(self, profile: StepProfile) -> None:
        """See `engine.StepRunner`."""
        self._device = profile.watch(self._device)

    def dispatch(self, plan: StepPlan, settle: Callable[[], None] | None = None) -> StepHandle:
        """Starts the step; does not wait for it. See `engine.StepRunner`."""
        for sequence in plan.admitted:
            self._take_slot(sequence)
        bucket = self._bucket(plan)
        self._device.forward(bucket, self._pack_forward(bucket, plan.rows))
        sample = self._pack_sample(bucket.sampled, plan.rows)
        constrained = [(sequence.slot, sequence.matcher) for sequence in plan.constrained]
        if settle is not None:
            settle()
        self._allow_tokens(constrained)
        return StepHandle(plan=plan, result=self._device.sample(bucket.sampled, sample))

    def read(self, handle: StepHandle) -> list[SampledRow]:
        """Waits for a step and returns one entry per row of its plan."""
        rows, result = handle.plan.rows, handle.result
        read = self._device.read
        tokens, ok = read(result.tokens).tolist(), read(result.ok).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * handle.plan.num_samples
        if any(row.sequence.request.sampling.logprobs is not None for row in rows):
            logprobs = self._read_logprobs(rows, result, tokens)
        sampled, end = [], 0
        for row in rows:
            begin, end = end, end + row.num_samples
            count = num_accepted(row.draft, tokens[begin:end])
            span = slice(begin, begin + count)
            sound = ok[span].index(False) if False in ok[span] else count
            sampled.append(
                SampledRow(
                    tokens=tokens[begin : begin + sound],
                    ok=sound == count,
                    logprobs=[item for item in logprobs[span] if item is not None][:sound] or None,
                )
            )
        return sampled

    def warm_up(self) -> None:
        """Runs the smallest program once on padding only, so that the first request finds it warm."""
        self.read(self.dispatch(StepPlan()))

    def _bucket(self, plan: StepPlan) -> Bucket:
        num_rows = max(len(plan.rows), plan.num_samples)
        return choose_bucket(self._shape.buckets, plan.num_tokens, num_rows)

    def _take_slot(self, sequence: Sequence) -> None:
        request = sequence.request
        params = request.sampling
        self._templates[sequence.slot] = row_template(
            params, sequence.seed, constrained=sequence.matcher is not None
        )
        self._tables[sequence.slot] = 0
        self._num_pages[sequence.slot] = 0
        if not needs_reset(params):
            return
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self._shape.eos_ids | set(request.eos_ids)
        reset = slot_reset(
            sequence.slot,
            params,
            prompt_ids=request.prompt_ids,
            output_ids=sequence.tokens[sequence.num_prompt_tokens :],
            stop_ids=sorted(token for token in ends if token < self.vocab_size),
            vocab_size=self.vocab_size,
            limits=self._shape.limits,
        )
        self._device.reset_slot(reset)

    def _allow_tokens(self, constrained: list[tuple[int, Matcher | None]]) -> None:
        """Hands over the masks of slots; nothing at all where no row is constrained."""
        for start in range(0, len(constrained), MASKS_AT_ONCE):
            some = constrained[start : start + MASKS_AT_ONCE]
            slots = np.full(MASKS_AT_ONCE, self._shape.max_num_seqs, np.int32)
            masks = np.zeros((MASKS_AT_ONCE, -(-self.vocab_size // 32)), np.uint32)
            for index, (slot, matcher) in enumerate(some):
                assert matcher is not None
                slots[index], masks[index] = slot, matcher.mask
            self._device.allow_tokens(slots, masks)

    def _pack_forward(self, bucket: Bucket, rows: list[ScheduledRow]) -> np.ndarray:
        packed, views = self._layouts[bucket].make_buffer()
        tokens: list[int] = []
        ends, lengths, slots = [0], [], []
        sampled: list[int] = []
        for row in rows:
            sequence = row.sequence
            tokens += sequence.tokens[row.start : row.num_known]
            if row.feeds_back:
                tokens.append(-1 - sequence.slot)
            tokens += row.draft
            end = len(tokens)
            ends.append(end)
            lengths.append(row.start + row.count)
            sampled += range(end - row.num_samples, end)
            slots.append(sequence.slot)
            self._note_pages(sequence)
        views["token_ids"][: len(tokens)] = tokens
        views["cu_q_lens"][: len(ends)] = ends
        views["cu_q_lens"][len(ends) :] = len(tokens)
        views["kv_lens"][: len(rows)] = lengths
        views["sampled"][: len(sampled)] = sampled
        views["block_tables"][: len(rows)] = self._tables[slots]
        return packed

    def _note_pages(self, sequence: Sequence) -> None:
        """Enters the pages that a sequence got since its last step: it only ever gets more."""
        slot, pages = sequence.slot, sequence.pages
        known = self._num_pages[slot]
        if known < len(pages):
            self._tables[slot, known : len(pages)] = pages[known:]
            self._num_pages[slot] = len(pages)

    def _pack_sample(self, num_rows: int, rows: list[ScheduledRow]) -> np.ndarray:
        packed, views = self._sample_layouts[num_rows].make_buffer()
        entries = []
        for row in rows:
            sequence = row.sequence
            for place in range(row.num_samples):
                position = row.num_known + place
                entries.append(
                    RowEntry(
                        template=self._templates[sequence.slot],
                        slot=sequence.slot,
                        position=position,
                        num_generated=position - sequence.num_prompt_tokens,
                        guess=row.draft[place - 1] if place else None,
                    )
                )
        sampling = row_arrays(entries, num_rows, self._shape.max_num_seqs)
        views["ints"][:], views["floats"][:] = sampling.ints, sampling.floats
        return packed

    def _read_logprobs(
        self, rows: list[ScheduledRow], result: SampleResult, tokens: list[int]
    ) -> list[TokenLogprobs | None]:
        read = self._device.read
        chosen, top_ids = read(result.logprob), read(result.top_ids)
        top_logprobs = read(result.top_logprobs)
        out: list[TokenLogprobs | None] = []
        sampled = (row for row in rows for _ in range(row.num_samples))
        for index, row in enumerate(sampled):
            wanted = row.sequence.request.sampling.logprobs
            if wanted is None:
                out.append(None)
                continue
            out.append(
                TokenLogprobs(
                    token_id=tokens[index],
                    logprob=float(chosen[index]),
                    top_ids=top_ids[index, :wanted].tolist(),
                    top_logprobs=top_logprobs[index, :wanted].tolist(),
                )
            )
        return out


def num_accepted(draft: list[int], tokens: list[int]) -> int:
    """How many of a row's sampled tokens count: those before which all guesses came true."""
    for count, (guess, token) in enumerate(zip(draft, tokens, strict=False), 1):
        if guess != token:
            return count
    return len(tokens)
