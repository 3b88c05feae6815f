"""The arithmetic of plans, on numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineConfig, LayerConfig, ModelConfig
from jaxserve.engine.memory import NO_OVERHEAD, Overhead
from jaxserve.errors import UsageError
from jaxserve.models.loading import ParameterInfo
from jaxserve.plan import fit
from jaxserve.plan.bound import (
    ReadWeights,
    StepWork,
    decode_work,
    price_per_million,
    step_bound,
)
from jaxserve.plan.chips import Chip, Slice, known_chips, parse_topology, slices_of
from jaxserve.plan.collectives import Traffic, add_traffic, read_collectives, sent_bytes
from jaxserve.plan.depth import ProgramSize, at_depth, choose_depths

FULL, SLIDING = LayerConfig(window=None, rope=None), LayerConfig(window=10, rope=None)


def make_model(**changes: Any) -> ModelConfig:
    """Four layers, 8 heads over 4 KV heads of 16, width 128, 1,000 tokens."""
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 1000,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_size": 16,
        "ffn_size": 320,
        "max_position": 4096,
        "layers": (FULL,) * 4,
    }
    return ModelConfig(**{**values, **changes})


def make_chip(**changes: Any) -> Chip:
    """A thousand bytes and a million operations a second."""
    values: dict[str, Any] = {
        "platform": "tpu",
        "compiler_name": "x",
        "devices_per_chip": 1,
        "hbm_bytes": 2_000_000,
        "usable_hbm_bytes": 1_000_000,
        "hbm_bytes_per_second": 1000.0,
        "operations_per_second": {"bfloat16": 1e6, "int8": 2e6},
        "link_bytes_per_second": 100.0,
        "reduces_in_network": False,
        "topologies": {"1": 1},
        "sources": {},
    }
    return Chip(**{**values, **changes})


# --- chips ---


def test_every_number_of_every_chip_has_a_source() -> None:
    names = {field.name for field in dataclasses.fields(Chip)}
    numbers = names - {
        "platform",
        "compiler_name",
        "devices_per_chip",
        "reduces_in_network",
        "sources",
    }
    for name, chip in known_chips().items():
        assert chip.sources.keys() == numbers, name
        assert all("http" in text or "libtpu" in text for text in chip.sources.values()), name
        assert 0.7 * chip.hbm_bytes < chip.usable_hbm_bytes < 1.01 * chip.hbm_bytes
        assert list(chip.topologies.values()) == sorted(chip.topologies.values())


def test_topologies_by_name() -> None:
    assert parse_topology("v6e:2x4") == Slice(kind="v6e", topology="2x4")
    assert parse_topology("v6e:2x4").num_devices == 8
    assert parse_topology("7x:2x2x1").num_devices == 8  # two devices on each of four chips
    assert parse_topology("h100:8").chip.platform == "gpu"
    assert [str(each) for each in slices_of("h200")] == ["h200:1", "h200:2", "h200:4", "h200:8"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v9:2x2", "'v9:2x2'; the chips are v5e, v5p, v6e, 7x, h100, h200"),
        ("", "the chips are"),
        ("v6e", "there are v6e:1x1, v6e:2x2, v6e:2x4"),
        ("v5p:2x4", "there are v5p:2x2x1"),
        ("h100:3", "there are h100:1, h100:2, h100:4, h100:8"),
    ],
)
def test_unknown_chips_and_topologies_list_what_there_is(text: str, words: str) -> None:
    with pytest.raises(UsageError, match="--topology is") as caught:
        parse_topology(text)
    assert words in str(caught.value)


# --- collectives ---

#: Lines as compilers for TPUs (layouts with brackets) and GPUs (start and done) write them.
TEXT = """
  %ar.1 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(bf16[128,4096]{1,0} %fusion.3), channel_id=1
  %ar.2 = (f32[10]{0}, f32[6]{0}) all-reduce(f32[10]{0} %a, f32[6]{0} %b), channel_id=2
  %ags = (f32[4,8]{1,0}, f32[4,32]{1,0}) all-gather-start(f32[4,8]{1,0} %c), dimensions={1}
  %agd = f32[4,32]{1,0} all-gather-done((f32[4,8]{1,0}, f32[4,32]{1,0}) %ags)
  %rs = bf16[16]{0} reduce-scatter(bf16[128]{0} %d), channel_id=4
  %other = f32[8]{0} fusion(f32[8]{0} %all-reduce-like), kind=kLoop
  ROOT %p = pred[7]{0} all-to-all(pred[7]{0} %e)
"""


def test_collectives_are_read_with_their_bytes() -> None:
    assert read_collectives(TEXT, num_devices=8) == {
        "all-reduce": Traffic(count=2, bytes=128 * 4096 * 2 + 16 * 4),
        "all-gather": Traffic(count=1, bytes=4 * 32 * 4),
        "reduce-scatter": Traffic(count=1, bytes=16 * 2 * 8),
        "all-to-all": Traffic(count=1, bytes=7),
    }


def test_what_a_chip_must_send() -> None:
    moved = {
        "all-reduce": Traffic(count=3, bytes=800),
        "all-gather": Traffic(count=1, bytes=80),
    }
    # 7/8 of everything, the sum's twice: 2 * 700 + 70.
    assert sent_bytes(moved, 8, reduces_in_network=False) == 1470
    assert sent_bytes(moved, 8, reduces_in_network=True) == 770
    assert sent_bytes(moved, 1, reduces_in_network=False) == 0


def test_programs_add_up() -> None:
    one = {"all-reduce": Traffic(count=1, bytes=2)}
    assert add_traffic((one, one, {})) == {"all-reduce": Traffic(count=2, bytes=4)}


# --- the bound ---


def test_work_of_a_step() -> None:
    work = decode_work(
        make_model(layers=(FULL, SLIDING, FULL, SLIDING)),
        ReadWeights(num_bytes=5000, matrix_elements=2000),
        users=3,
        context=100,
        tensor_parallel=2,
        kv_token_bytes=7,
        sent_bytes=11.0,
    )
    seen = 100 + 10 + 100 + 10  # a window of 10 sees 10
    assert work == StepWork(
        weight_bytes=5000,
        kv_bytes=3 * seen * 7,
        logits_bytes=2 * 3 * 1000 * 4,
        operations=3 * (2 * 2000 + 4 * 4 * 16 * seen),  # 4 heads on each device
        sent_bytes=11.0,
    )


WORK = StepWork(
    weight_bytes=1500, kv_bytes=400, logits_bytes=100, operations=3_000_000, sent_bytes=50.0
)


def test_the_slowest_part_bounds_the_step() -> None:
    bound = step_bound(WORK, make_chip(), "bfloat16")
    assert (bound.memory_seconds, bound.compute_seconds, bound.link_seconds) == (2.0, 3.0, 0.5)
    assert (bound.seconds, bound.limited_by) == (3.0, "arithmetic")
    assert step_bound(WORK, make_chip(), "int8").seconds == 2.0
    assert step_bound(WORK, make_chip(), "float32").compute_seconds == 3.0


def test_devices_share_their_chip() -> None:
    """Half the memory and arithmetic for each of two; links belong to the chip."""
    bound = step_bound(WORK, make_chip(devices_per_chip=2), "bfloat16")
    assert (bound.memory_seconds, bound.compute_seconds, bound.link_seconds) == (4.0, 6.0, 0.5)


def test_the_bound_lies_below_what_was_measured() -> None:
    """vLLM on a v6e-8, Llama-3.3-70B in bfloat16, 128 users of 1,000 tokens in and 1,000 out.

    35.1 ms per token were measured; users have 1,500 tokens on average.
    """
    embedding = 128_256 * 8192
    layer = 8192 * 128 * (64 + 64 + 8 + 8) + 3 * 8192 * 28_672
    elements = (80 * layer + embedding) // 8
    model = make_model(
        vocab_size=128_256, num_heads=64, num_kv_heads=8, head_size=128, layers=(FULL,) * 80
    )
    work = decode_work(
        model,
        ReadWeights(num_bytes=2 * elements, matrix_elements=elements),
        users=128,
        context=1500,
        tensor_parallel=8,
        kv_token_bytes=2 * 128 * 2,
        sent_bytes=0.0,
    )
    bound = step_bound(work, known_chips()["v6e"], "bfloat16")
    assert bound.limited_by == "memory"
    assert 0.0150 < bound.seconds < 0.0160


def test_price_of_a_million_tokens() -> None:
    # 8 chips at 2 an hour for 0.01 s: 16 / 360,000; 100 tokens each time.
    price = price_per_million(0.01, users=100, num_chips=8, price_per_chip_hour=2.0)
    assert price == pytest.approx(16 / 360_000 / 100 * 1e6)


# --- depth ---


def make_size(**changes: Any) -> ProgramSize:
    values: dict[str, Any] = {
        "arguments": 100,
        "outputs": 50,
        "aliased": 40,
        "temporaries": 10,
        "code": 20,
        "collectives": {"all-reduce": Traffic(count=9, bytes=90)},
    }
    return ProgramSize(**{**values, **changes})


@pytest.mark.parametrize(
    ("layers", "exact", "depths"),
    [
        ((FULL,) * 32, False, (4, 8)),
        ((FULL,) * 32, True, (32,)),
        ((FULL,) * 8, False, (8,)),
        ((FULL,) * 9, False, (4, 8)),
        ((SLIDING, FULL) * 21, False, (4, 8)),
        (((SLIDING,) * 5 + (FULL,)) * 5, False, (6, 12)),
        (((SLIDING,) * 2 + (FULL,)) * 9, False, (6, 12)),
        ((SLIDING,) * 20 + (FULL,) * 12, False, (32,)),  # no rounds: nothing can be left out
    ],
)
def test_which_depths_are_compiled(
    layers: tuple[LayerConfig, ...], exact: bool, depths: tuple[int, ...]
) -> None:
    assert choose_depths(layers, exact=exact) == depths


def test_each_layer_adds_the_same() -> None:
    more = make_size(
        arguments=140,
        outputs=60,
        aliased=50,
        code=20 + 8,
        collectives={"all-reduce": Traffic(count=17, bytes=170)},
    )
    assert at_depth({4: make_size(), 8: more}, 32) == ProgramSize(
        arguments=100 + 7 * 40,
        outputs=50 + 7 * 10,
        aliased=40 + 7 * 10,
        temporaries=10,
        code=4 * 28,  # on the line it would be 76
        collectives={"all-reduce": Traffic(count=65, bytes=650)},
    )


def test_code_and_temporaries_are_rather_too_high() -> None:
    """Temporaries grow by twice what was seen; code that is shared grows with its layers."""
    sizes = {4: make_size(temporaries=2, code=90), 8: make_size(temporaries=10, code=30)}
    whole = at_depth(sizes, 32)
    assert whole.temporaries == 10 + 2 * 2 * 24
    assert whole.code == 4 * 30  # on the line it would be less than nothing
    shrinking = {4: make_size(temporaries=10), 8: make_size(temporaries=2)}
    assert at_depth(shrinking, 32).temporaries == 2


def test_one_depth_is_taken_as_it_is() -> None:
    assert at_depth({6: make_size()}, 6) == make_size()


# --- fit ---


def info(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParameterInfo:
    return ParameterInfo(shape=shape, dtype=np.dtype(np.float16), logical_axes=axes)


PARAMETERS = {
    "embed.weight": info((1001, 16), ("vocab", "embed")),
    "q.weight": info((32, 16), ("heads", "embed")),
    "norm.weight": info((16,), ("embed",)),
}


def test_shares_of_parameters() -> None:
    whole = 1001 * 16 + 32 * 16
    assert fit.weight_bytes(PARAMETERS, 1) == 2 * (whole + 16)
    # 1,001 tokens do not divide: every device has the whole embedding.
    assert fit.weight_bytes(PARAMETERS, 2) == 2 * (1001 * 16 + 16 * 16 + 16)
    assert fit.matrix_elements(PARAMETERS, 2) == 1001 * 16 + 16 * 16


def test_splits_divide_heads_and_width() -> None:
    assert fit.valid_splits(make_model()) == [1, 2, 4]
    assert fit.valid_splits(make_model(num_heads=28, ffn_size=18_944)) == [1, 2, 4]
    assert fit.valid_splits(make_model(num_heads=9, num_kv_heads=3, ffn_size=1536)) == [1, 3]


@pytest.mark.parametrize(
    ("split", "all_devices", "words"),
    [
        (
            8,
            True,
            "the 8 devices of v6e:2x4 do not divide the model .* give --tensor-parallel 1, 2, 4",
        ),
        (3, False, "--tensor-parallel 3 does not divide the model .8 heads over 4 KV heads"),
        (16, False, "--tensor-parallel is 16, but v6e:2x4 has 8 devices"),
    ],
)
def test_a_split_that_cannot_be(split: int, all_devices: bool, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fit.check_split(make_model(), parse_topology("v6e:2x4"), split, all_devices=all_devices)


def test_memory_is_filled_as_the_engine_does() -> None:
    filled = fit.fill_memory(
        EngineConfig(page_size=16),
        usable=100_000,
        weights=20_000,
        overhead=Overhead(state=1_000, programs=2_000, temporaries=3_000),
        page_bytes=10_000,
        pages_per_sequence=2,
    )
    assert filled is not None
    memory, capacity = filled
    assert memory.margin == 4_000  # a twentieth of what weights leave
    # 80,000 - 4,000 - 6,000 hold 7 pages, one of them the trash page: 6 pages, 3 users of 2.
    assert memory.pool == 70_000
    assert (capacity.num_pages, capacity.num_tokens, capacity.users) == (7, 96, 3)


def test_no_room_for_a_page() -> None:
    filled = fit.fill_memory(
        EngineConfig(),
        usable=100,
        weights=90,
        overhead=NO_OVERHEAD,
        page_bytes=10,
        pages_per_sequence=1,
    )
    assert filled is None


def test_the_smallest_slice_that_holds_all() -> None:
    """Ten GiB of weights, and pages of a GiB on one device: 4 users of one page."""
    gibibyte = 2**30
    parameters = {"w": info((5 * 2**20, 1024), ("heads", "embed"))}
    need = fit.Need(
        config=EngineConfig(),
        model=make_model(),
        parameters=parameters,
        overhead=NO_OVERHEAD,
        page_bytes=lambda split: gibibyte // split,
        pages_per_sequence=1,
    )
    # One v5e has 15.75 GiB: 10 of weights, 5.4 of pages; the trash page leaves 4.
    assert str(need.smallest("v5e", users=4)) == "v5e:1x1"
    assert str(need.smallest("v5e", users=5)) == "v5e:2x2"
    assert need.smallest("v5e", users=1000) is None  # it splits over four devices at most
    assert [str(each) for each in need.elsewhere("v5e", users=200)] == ["v5p:2x2x1"]
