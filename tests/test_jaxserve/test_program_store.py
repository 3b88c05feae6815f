import ast
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import program_store
from jaxserve.engine.program_store import ProgramStore

PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jaxserve.engine.program_store import ProgramStore

store = ProgramStore(pathlib.Path(sys.argv[1]), jax.devices()[:1], ["facts"])
stand_in = jax.ShapeDtypeStruct((3,), jnp.float32)
program = store.get(
    "double", (stand_in,), lambda: 0, lambda: jax.jit(lambda x: 2 * x).lower(stand_in).compile()
)
print(store.num_loaded, np.asarray(program(np.ones(3, np.float32))).tolist())
"""


def run(folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_another_process_finds_the_program_and_it_computes_the_same(tmp_path):
    assert run(tmp_path) == "0 [2.0, 2.0, 2.0]"
    assert run(tmp_path) == "1 [2.0, 2.0, 2.0]"


STAND_IN = jax.ShapeDtypeStruct((3,), jnp.float32)


def get(folder, facts, factor):
    store = ProgramStore(folder, jax.devices()[:1], facts)
    program = store.get(
        "scale",
        (STAND_IN,),
        lambda: 0,
        lambda: jax.jit(lambda x: factor * x).lower(STAND_IN).compile(),
    )
    return float(program(np.ones(3, np.float32))[0]), store.num_loaded


def test_other_facts_are_another_program(tmp_path):
    assert get(tmp_path, ["a"], 2) == (2.0, 0)
    assert get(tmp_path, ["b"], 3) == (3.0, 0)
    assert get(tmp_path, ["a"], 5) == (2.0, 1)  # found: the compiler was not asked


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_file_is_compiled_again(tmp_path, damage, caplog):
    get(tmp_path, ["a"], 2)
    (path,) = tmp_path.rglob("*.jaxexe")
    path.write_bytes(path.read_bytes()[:-50] if damage is None else damage)
    with caplog.at_level(logging.WARNING, logger="jaxserve.engine"):
        assert get(tmp_path, ["a"], 7) == (7.0, 0)
    assert "cannot be used" in caplog.text
    assert get(tmp_path, ["a"], 9) == (7.0, 1)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, logger="jaxserve.engine"):
        assert get(blocked, ["a"], 2) == (2.0, 0)
    assert "could not be stored" in caplog.text


def test_the_sets_unused_for_longest_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(program_store, "MAX_SETS", 2)
    for number, name in enumerate("abc"):
        get(tmp_path, [name], 2)
        for folder in tmp_path.iterdir():
            stamp = folder.stat().st_mtime - 10
            os.utime(folder, (stamp, stamp))
        assert len(list(tmp_path.iterdir())) == min(number + 1, 2)
    assert get(tmp_path, ["c"], 3) == (2.0, 1)
    assert get(tmp_path, ["a"], 3) == (3.0, 0)


def imported_files(module):
    """The files of jaxserve that a module needs, itself included, found by reading imports."""
    package = pathlib.Path(program_store.__file__).parents[1]
    todo, found = [module], set()
    while todo:
        path = package.parent.joinpath(*todo.pop().split("."))
        files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
        if not files or files[0] in found or not files[0].is_relative_to(package):
            continue
        found.add(files[0])
        for node in ast.walk(ast.parse(files[0].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {str(file.relative_to(package)) for file in found}


#: What the makers of programs import that decides nothing inside a program.
BESIDE = {"__init__.py", "errors.py", "engine/__init__.py", "engine/memory.py"} | {
    "engine/program_store.py"
}


def test_a_change_of_any_file_that_shapes_programs_makes_new_ones():
    known = {str(path.relative_to(root)) for root, path in program_store.program_sources()}
    needed = imported_files("jaxserve.engine.compiling") | imported_files("jaxserve.models.decoder")
    assert {"engine/programs.py", "models/decoder.py", "sampling/sampler.py"} <= needed
    assert needed - BESIDE <= known
    assert "engine/scheduler.py" not in known  # most changes leave programs as they are
