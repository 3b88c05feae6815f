"""Missing, extra and wrongly shaped tensors are reported together."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointFormatError
from checkpoints.open import open_checkpoint
from checkpoints.reader import CheckpointReader
from checkpoints.validate import check_tensors


def reader_of(folder: pathlib.Path, **shapes: tuple[int, ...]) -> CheckpointReader:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_all_right(tmp_path: pathlib.Path) -> None:
    reader = reader_of(tmp_path, a=(2, 3), b=(), rotary=(4,))
    check_tensors({"a": (2, 3), "b": ()}, reader, ignore=lambda name: name == "rotary")


def test_everything_at_once(tmp_path: pathlib.Path) -> None:
    reader = reader_of(tmp_path, a=(2, 3), b=(4,), c=(5,), d=())
    with pytest.raises(CheckpointFormatError) as caught:
        check_tensors({"a": (3, 2), "b": (4,), "e": (1,), "f": (1,), "d": (1,)}, reader)
    text = str(caught.value)
    assert "2 missing (e, f)" in text
    assert "1 not expected (c)" in text
    assert "2 wrongly shaped (a has 2x3, not 3x2, d has scalar, not 1)" in text
    assert "\n" not in text


def test_long_lists_are_counted(tmp_path: pathlib.Path) -> None:
    reader = reader_of(tmp_path, a=(1,))
    expected = {"a": (1,), **{f"t{i:02}": (1,) for i in range(25)}}
    with pytest.raises(CheckpointFormatError) as caught:
        check_tensors(expected, reader)
    assert "25 missing (t00, t01" in str(caught.value)
    assert "t09 and 15 more)" in str(caught.value)
    assert "t10" not in str(caught.value)
