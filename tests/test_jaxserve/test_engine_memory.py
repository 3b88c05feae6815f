"""What an accelerator holds beside pages, from what a made-up compiler says of each program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.config import EngineConfig, LayerConfig, ModelConfig, RopeConfig
from jaxserve.engine.buckets import Bucket, make_buckets
from jaxserve.engine.compiling import ProgramMaker, program_memory
from jaxserve.engine.memory import Overhead, measured_buckets, plan_pages
from jaxserve.errors import ResourceError
from jaxserve.parallel.mesh import make_mesh
from jaxserve.plan import measure

#: Buckets (1, 1), (2, 2), (4, 4) and three more of 4 rows, up to (32, 4): six `forward`, three
#: `sample`, one `reset_slot`.
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
    page_size=16,
    speculative="off",
)
BUCKETS = make_buckets(32, 4)
LAYER = LayerConfig(window=None, rope=RopeConfig(theta=10_000.0, rotary_dim=16))
MODEL = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_size=48,
    max_position=64,
    layers=(LAYER, LAYER),
)


@dataclasses.dataclass(frozen=True)
class FakeProgram:
    """Says of itself what it is told to."""

    outputs: int
    aliased: int
    temporaries: int
    code: int

    def memory_analysis(self) -> SimpleNamespace:
        return SimpleNamespace(
            argument_size_in_bytes=0,
            output_size_in_bytes=self.outputs,
            alias_size_in_bytes=self.aliased,
            temp_size_in_bytes=self.temporaries,
            generated_code_size_in_bytes=self.code,
        )

    def as_text(self) -> str:
        return ""


PROGRAMS = {
    "forward_4_4": FakeProgram(outputs=999, aliased=0, temporaries=100, code=30),
    "forward_32_4": FakeProgram(outputs=5_007, aliased=5_000, temporaries=200, code=50),
    "sample_4": FakeProgram(outputs=999, aliased=600, temporaries=400, code=10),
    "reset_slot": FakeProgram(outputs=999, aliased=600, temporaries=300, code=3),
}
#: Buckets up to (4, 4) count as that one, all others as (32, 4); rows are sampled by 1 or 4; temporaries are sampling's; logits
#: of two steps take 7 bytes each.
OVERHEAD = Overhead(state=600, programs=3 * 30 + 3 * 50 + 2 * 10 + 3, temporaries=400 + 2 * 7)


class FakeStore:
    """Gives the program of a name; those that nobody is to ask for are missing."""

    num_loaded = 0

    def get(self, name: str, *others: object) -> Any:
        return PROGRAMS[name]


def make_maker() -> ProgramMaker:
    device = measure.abstract_model(CONFIG, MODEL, make_mesh(1), "cpu")
    return measure.step_maker(CONFIG, device, num_pages=8)


def test_few_programs_stand_for_all() -> None:
    assert measured_buckets(BUCKETS) == (Bucket(tokens=4, rows=4), Bucket(tokens=32, rows=4))
    assert measured_buckets(BUCKETS[:1]) == BUCKETS[:1]


def test_everything_that_programs_take_is_counted() -> None:
    store: Any = FakeStore()
    assert make_maker().measure(BUCKETS, store) == OVERHEAD


def test_a_plan_counts_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(name: Callable[..., str]) -> Callable[..., FakeProgram]:
        return lambda maker, *arguments: PROGRAMS[name(*arguments)]

    monkeypatch.setattr(
        measure, "compile_forward", give(lambda bucket: f"forward_{bucket.tokens}_{bucket.rows}")
    )
    monkeypatch.setattr(measure, "compile_sample", give(lambda rows: f"sample_{rows}"))
    monkeypatch.setattr(measure, "compile_reset", give(lambda: "reset_slot"))
    step = measure.measure_step(
        CONFIG,
        MODEL,
        jax.devices(),
        "cpu",
        num_pages=8,
        exact=True,
        say=lambda text: None,
    )
    assert step.overhead == OVERHEAD
    assert step.num_served == 9


def test_a_real_program_says_what_it_takes() -> None:
    made = program_memory(make_maker().compile_reset())
    assert made.outputs >= made.aliased > 4 * 4 * MODEL.vocab_size


def plan(free: int) -> Any:
    return plan_pages(
        CONFIG,
        page=1_000,
        weights=5,
        overhead=OVERHEAD,
        pages_per_sequence=50,
        free=free,
        on_cpu=False,
    )


def test_pages_get_what_remains() -> None:
    """A twentieth is left alone: of 10,000 bytes 9,500 remain, 1,277 of them for the overhead."""
    assert OVERHEAD.total == 1_277
    assert plan(10_000).num_pages == 8
    assert plan(10_000).overhead == OVERHEAD
    assert plan(1_000_000).limited_by == "all slots at full length"


def test_a_refusal_says_what_programs_need() -> None:
    with pytest.raises(ResourceError, match=r"3,000 bytes are free, of which programs need 1,277"):
        plan(3_000)
