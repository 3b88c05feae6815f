"""Block sizes, layouts and refusals of the TPU products; nothing is compiled here."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul import cases, tpu, tpu_blocks
from pallas_kernels.quantized_matmul.scheme import SCHEMES, Scheme
from pallas_kernels.quantized_matmul.tpu_blocks import Blocks
from pallas_kernels.quantized_matmul.tpu_facts import Facts, is_turned

DOWN = Facts(
    rows=512,
    out_size=4096,
    in_size=14336,
    scheme=SCHEMES["int4_group32"],
    dtype=np.dtype(jnp.bfloat16),
    out_dtype=np.dtype(jnp.bfloat16),
)
CALL: dict[str, Any] = {
    "platform": "tpu",
    "dtype": "bfloat16",
    "scheme": SCHEMES["int4_group32"],
    "out_size": 4096,
    "in_size": 14336,
}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_rule_fits(name: str) -> None:
    scheme = SCHEMES[name]
    for case in cases.FULL:
        if not case.fits(scheme):
            continue
        for rows in (case.rows, 13 * case.rows):
            for dtype in ("bfloat16", "float32"):
                facts = Facts(
                    rows=rows,
                    out_size=case.out_size,
                    in_size=case.in_size,
                    scheme=scheme,
                    dtype=np.dtype(dtype),
                    out_dtype=np.dtype(dtype),
                )
                blocks = tpu_blocks.rule(facts)
                tpu_blocks.check(blocks, facts)
                # Once through the weight is enough for the rows of a decoding step.
                assert blocks.rows == facts.padded_rows or rows > 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 512, "outputs": 4096}, "shrink rows (it is 512"),
        ({"outputs": 4096, "columns": 7168, "way": "sums", "rows": 32}, "shrink columns (it is"),
        ({"outputs": 4096, "way": "sums", "rows": 32}, "shrink outputs (it is 4096"),
        ({"rows": 24}, "rows is 24; it must be all 512 or a multiple of 32 below"),
        ({"outputs": 8192}, "outputs is 8192; it must be all 4096 or a multiple of 128 below"),
        ({"columns": 64}, "columns is 64; it must be all 7168 or a multiple of 128 below"),
        ({"columns": 640}, "columns is 640; it must divide 7168"),
        ({"way": "end"}, 'way is "end"; with scales of groups it must be'),
    ],
)
def test_blocks_that_cannot_be_are_named(change: dict[str, Any], words: str) -> None:
    blocks = dataclasses.replace(tpu_blocks.rule(DOWN), **change)
    with pytest.raises(KernelError) as caught:
        tpu_blocks.check(blocks, DOWN)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ways_that_cannot_be_are_named() -> None:
    rows = dataclasses.replace(DOWN, scheme=SCHEMES["int8"])
    blocks = dataclasses.replace(tpu_blocks.rule(rows), way="sums")
    with pytest.raises(KernelError, match='with one scale per output it must be "end"'):
        tpu_blocks.check(blocks, rows)
    wide = dataclasses.replace(DOWN, scheme=SCHEMES["int8_group128"])
    blocks = dataclasses.replace(tpu_blocks.rule(wide), way="weights")
    with pytest.raises(KernelError, match='groups of 128 it must be "sums"'):
        tpu_blocks.check(blocks, wide)


def test_small_groups_have_two_ways() -> None:
    """Few rows: sums of groups are scaled; many: the weights are."""
    for rows, way in ((1, "sums"), (16, "sums"), (32, "weights"), (4096, "weights")):
        facts = dataclasses.replace(DOWN, rows=rows)
        assert tpu_blocks.rule(facts).way == way
        wide = dataclasses.replace(facts, scheme=SCHEMES["int4_group128"])
        assert tpu_blocks.rule(wide).way == "sums"


def test_measured_blocks_come_before_the_rule(tmp_path: pathlib.Path) -> None:
    call = {
        "device_kind": "TPU v6 lite",
        "rows": 32,
        "out_size": 4096,
        "in_size": 14336,
        "scheme": "int4_group32",
        "dtype": "bfloat16",
    }
    measured = Blocks(way="sums", rows=32, outputs=256, columns=7168)
    table = tmp_path / "blocks.json"
    entry = {"call": call, "blocks": dataclasses.asdict(measured), "measured": {}}
    table.write_text(json.dumps({"entries": [entry]}))
    facts = dataclasses.replace(DOWN, rows=27)
    assert tpu_blocks.choose_blocks(facts, "TPU v6 lite", table) == measured
    assert tpu_blocks.choose_blocks(facts, "TPU v5 lite", table) == tpu_blocks.rule(facts)
    others = dataclasses.replace(facts, rows=33)
    assert tpu_blocks.choose_blocks(others, "TPU v6 lite", table) == tpu_blocks.rule(others)


def test_every_entry_of_the_table_is_sound() -> None:
    for entry in json.loads(tpu_blocks.TABLE.read_text())["entries"]:
        assert {"call", "blocks", "measured"} == set(entry)
        assert {"date", "jax", "by", "microseconds", "rule_microseconds"} <= set(entry["measured"])
        Blocks(**entry["blocks"])


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((4096, 4096), False),
        ((49152, 288), True),
        ((960, 576), True),
        ((576, 576), False),
        ((28672, 128), False),
        ((28672, 32), True),
        ((4096, 448), True),
    ],
)
def test_layouts_as_xla_was_seen_to_choose_them(shape: tuple[int, int], turned: bool) -> None:
    """`pytest -m compile` sees the copies if XLA changes its mind."""
    assert is_turned(*shape) is turned


@pytest.mark.parametrize("name", SCHEMES)
def test_refuses_no_scheme(name: str) -> None:
    assert tpu.refusals(**(CALL | {"scheme": SCHEMES[name]})) == []


def test_is_the_choice_on_tpus() -> None:
    choice = dispatch.choose("quantized_matmul", **CALL)
    assert choice.implementation == "tpu"
    assert set(choice.refused) == {"cpu"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": "gpu"}, "it runs on tpu, not on gpu"),
        ({"dtype": "float16"}, "x of float16 is not among float32, bfloat16"),
        ({"in_size": 48}, "int4_group32: rows of 48 weights are not made of groups of 32"),
        (
            {"scheme": Scheme(name="a", values="int8", group=2048, activations="int8_group")},
            "sums of groups of 2048 with int8_group are not exact",
        ),
        (
            {"scheme": Scheme(name="a", values="int8"), "in_size": 10**6 + 1},
            "shrink columns (it is 1000001",
        ),
    ],
)
def test_refuses_with_a_reason(change: dict[str, Any], words: str) -> None:
    (reason,) = tpu.refusals(**(CALL | change))
    assert words in reason
