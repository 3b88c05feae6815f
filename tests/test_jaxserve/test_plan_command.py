"""`jaxserve plan`: its arguments, the child that it starts, and what it prints. Nothing is compiled."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from checkpoints.errors import CheckpointError
from jaxserve.cli import plan as verb
from jaxserve.cli.main import main, make_parser
from jaxserve.config import EngineConfig
from jaxserve.errors import ResourceError, UsageError
from jaxserve.models.loading import parameter_infos
from jaxserve.plan import launch, shapes
from jaxserve.plan.bound import StepBound, StepWork
from jaxserve.plan.chips import parse_topology
from jaxserve.plan.collectives import Traffic
from jaxserve.plan.job import read_weights, resolve
from jaxserve.plan.make import make_plan
from jaxserve.plan.messages import Capacity, Compiled, DeviceMemory, Plan, PlanRequest
from jaxserve.plan.report import to_json, to_text

WHERE = parse_topology("v6e:2x4")
MEBIBYTE = 2**20


def make_request(model: str, topology: str = "v6e:2x4", **changes: Any) -> PlanRequest:
    where = parse_topology(topology)
    settings = {"max_num_seqs": 128, "max_model_len": 2048, "tensor_parallel": where.num_devices}
    return PlanRequest(
        topology=topology,
        config=EngineConfig(model=model, **{**settings, **changes}),
        all_devices="tensor_parallel" not in changes,
        exact=False,
    )


def make_finished_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "model": "m",
        "source": "a file",
        "num_parameters": 1_000_000_000,
        "topology": "v6e:2x4",
        "num_devices": 8,
        "num_chips": 8,
        "dtype": "bfloat16",
        "weight_form": "bfloat16",
        "product_dtype": "bfloat16",
        "page_dtype": "bfloat16",
        "max_num_seqs": 128,
        "max_num_batched_tokens": 512,
        "context": 2048,
        "page_size": 16,
        "kernels": {"paged_attention": "paged_attention: tpu"},
        "memory": DeviceMemory(
            usable=1000 * MEBIBYTE,
            weights=300 * MEBIBYTE,
            state=20 * MEBIBYTE,
            programs=30 * MEBIBYTE,
            temporaries=40 * MEBIBYTE,
            margin=35 * MEBIBYTE,
            pool=512 * MEBIBYTE,
        ),
        "capacity": Capacity(num_pages=16385, page_bytes=100, num_tokens=262_144, users=128),
        "collectives": {"all-reduce": Traffic(count=65, bytes=3 * MEBIBYTE)},
        "users": 128,
        "work": StepWork(
            weight_bytes=1, kv_bytes=2, logits_bytes=3, operations=4, sent_bytes=5_000_000.0
        ),
        "bound": StepBound(memory_seconds=0.010, compute_seconds=0.001, link_seconds=0.002),
        "compiled": Compiled(
            depths=(4, 8), num_layers=32, num_programs=5, num_served=12, in_place=True, seconds=60.0
        ),
        "fits_at": "v6e:2x4",
    }
    return Plan(**{**values, **changes})


# --- shapes ---


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.3-70b", 70.55),
        ("qwen2.5-7b", 7.62),
        ("gemma-2-9b", 9.24),
        ("smollm2-135m-instruct", 0.1345),
    ],
)
def test_built_in_shapes_have_the_published_size(name: str, billions: float) -> None:
    model, source = shapes.read_shape(name, pathlib.Path())
    infos = parameter_infos(model, "bfloat16").values()
    elements = sum(_product(info.shape) for info in infos)
    assert elements == pytest.approx(billions * 1e9, rel=2e-3)
    assert "config.json of" in source


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def test_the_help_names_every_built_in_shape() -> None:
    (verbs,) = (
        action
        for action in make_parser()._actions
        if action.dest == "==SUPPRESS==" or action.choices
    )
    words = " ".join(verbs.choices["plan"].format_help().split()).replace("- ", "-")  # type: ignore[index]
    for name in shapes.known_shapes():
        assert name in words


def test_a_config_is_enough(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes.known_shapes()["llama-3.1-8b"].config))
    built_in, _ = shapes.read_shape("llama-3.1-8b", tmp_path)
    for argument in (str(file), str(tmp_path)):
        model, source = shapes.read_shape(argument, tmp_path)
        assert model == built_in
        assert source == str(file)


def test_only_the_config_of_a_hub_id_is_fetched(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes.known_shapes()["qwen2.5-7b"].config))
    asked = []

    def fetch(repository: str, name: str, revision: str | None) -> str:
        asked.append((repository, name, revision))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    model, source = shapes.read_shape("some/model@v2", tmp_path)
    assert (model.family, source) == ("qwen2", "config.json of some/model@v2")
    assert asked == [("some/model", "config.json", "v2")]

    def fail(*arguments: object, **settings: object) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(CheckpointError, match=r"some/model .*OSError: no network.; give the path"):
        shapes.read_shape("some/model", tmp_path)


def test_missing_models_say_what_is_built_in(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no model is called 'llama-9'.*built in for llama-3.1"
    ):
        shapes.read_shape("llama-9", tmp_path)


# --- what a job resolves to ---


def test_a_step_reads_all_weights_but_an_untied_embedding(tmp_path: pathlib.Path) -> None:
    job = resolve(make_request("llama-3.1-8b"), tmp_path)
    per_layer = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 14_336
    elements = (32 * per_layer + 128_256 * 4096) // 8
    norms = 65 * 4096 * 2
    read = read_weights(job)
    assert read.matrix_elements == elements
    assert norms < read.num_bytes - 2 * elements <= 2 * norms  # float32 or bfloat16
    assert job.weights == read.num_bytes + 128_256 * 4096 * 2 // 8
    assert job.attention.implementation == "tpu"
    tied = resolve(make_request("smollm2-135m-instruct", "v5e:1x1"), tmp_path)
    assert read_weights(tied).num_bytes == tied.weights


def test_int8_pages_take_half_and_their_scales(tmp_path: pathlib.Path) -> None:
    plain = resolve(make_request("llama-3.1-8b", "h100:8"), tmp_path)
    small = resolve(make_request("llama-3.1-8b", "h100:8", kv_cache_dtype="int8"), tmp_path)
    assert plain.page_bytes(8) == 32 * 2 * 16 * 128 * 2
    assert small.page_dtype == "int8"
    assert small.page_bytes(8) >= 32 * 2 * 16 * (128 + 4)
    assert small.page_bytes(8) < 0.75 * plain.page_bytes(8)


def test_quantised_weights_are_counted_as_they_are_stored(tmp_path: pathlib.Path) -> None:
    """Two devices: 8 bits and a float32 scale per row and, where columns are split, device."""
    plain = resolve(make_request("llama-3.1-8b", "v5p:2x2x1", tensor_parallel=2), tmp_path)
    job = resolve(
        make_request("llama-3.1-8b", "v5p:2x2x1", tensor_parallel=2, quantization="int8_token"),
        tmp_path,
    )
    embedding, width, ffn, kv = 128_256 * 4096, 4096, 14_336, 1024
    layer = width * (2 * width + 2 * kv) + 3 * width * ffn
    rows = width + 2 * kv + 2 * ffn + 2 * (width + width)  # those of two matrices are whole
    norms = 65 * width * 4
    assert job.weights == (32 * (layer + 4 * rows) + 2 * (embedding + 4 * 128_256)) // 2 + norms
    read, plain_read = read_weights(job), read_weights(plain)
    assert read.num_bytes == job.weights - (embedding + 4 * 128_256) // 2
    assert read.matrix_elements == plain_read.matrix_elements
    assert job.num_parameters == plain.num_parameters
    assert (job.weight_form, job.product_dtype) == ("int8_token", "int8")
    assert job.kernels["quantized_matmul"] == "quantized_matmul: tpu"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request("llama-3.1-8b", quantization="int3"), "--quantization: .*'int3'; use int8, "),
        (
            make_request("llama-3.1-8b", "h100:8", quantization="int8_group32_a16"),
            "--quantization: no fast product for int8_group32_a16: .*no tensor core multiplies int16",
        ),
        (make_request("llama-3.1-8b", max_model_len=200_000), "--context is 200000.* 131072"),
        (
            make_request("smollm2-135m-instruct"),
            "the 8 devices of v6e:2x4 .* give --tensor-parallel 1, 3",
        ),
        (make_request("qwen2.5-7b", tensor_parallel=8), "--tensor-parallel 8 does not divide"),
    ],
)
def test_settings_that_cannot_work(
    request_: PlanRequest, words: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make_plan(request_, tmp_path, print)
    assert "\n" not in str(caught.value)


def test_a_refusal_says_what_and_where_else(tmp_path: pathlib.Path) -> None:
    """Decided by shapes alone: neither compiler is here."""
    with pytest.raises(ResourceError) as caught:
        make_plan(make_request("llama-3.3-70b", "v5e:2x2"), tmp_path, print)
    text = str(caught.value)
    assert "32.9 GiB on each of 4 devices, of which programs may use 15.75 GiB" in text
    assert "no v5e holds it with 128 users of 2,048 tokens" in text
    assert "v6e:2x4" in text
    with pytest.raises(
        ResourceError, match="by its shapes, v6e:2x4 holds it with 64 users of 2,048"
    ):
        make_plan(make_request("llama-3.3-70b", "v6e:2x2", max_num_seqs=64), tmp_path, print)


# --- the child ---


def child(*lines: str, code: int = 0, error: str = "") -> list[str]:
    """A child that says these lines, whatever it is asked."""
    program = (
        "import sys; sys.stdin.read(); "
        f"sys.stdout.write({''.join(line + chr(10) for line in lines)!r}); "
        f"sys.stderr.write({error!r}); sys.exit({code})"
    )
    return [sys.executable, "-c", program]


@pytest.fixture
def no_compiler_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compiler_environment", lambda where: None)


@pytest.mark.usefixtures("no_compiler_needed")
def test_the_plan_comes_from_the_child() -> None:
    plan = make_finished_plan()
    said: list[str] = []
    done = json.dumps({"type": "planned", "plan": msgspec.to_builtins(plan)})
    found = launch.run_plan(
        make_request("m"),
        WHERE,
        said.append,
        command=child('{"type": "progress", "text": "compiling"}', done),
    )
    assert found == plan
    assert said == ["compiling"]


@pytest.mark.usefixtures("no_compiler_needed")
@pytest.mark.parametrize(
    ("command", "error", "words"),
    [
        (child('{"type": "failed", "text": "no", "is_usage": true}'), UsageError, "^no$"),
        (child('{"type": "failed", "text": "no", "is_usage": false}'), ResourceError, "^no$"),
        (child(error="x\nlibtpu: abort", code=134), ResourceError, "without a plan: libtpu: abort"),
        (child(), ResourceError, "--debug"),
    ],
)
def test_what_a_child_can_end_with(command: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        launch.run_plan(make_request("m"), WHERE, print, command=command)


@pytest.mark.parametrize(
    ("topology", "words"),
    [("v6e:2x4", "pip install 'jax.tpu.'"), ("h100:1", "pip install .*jax-cuda12-plugin")],
)
def test_a_missing_compiler_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, topology: str, words: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=words) as caught:
        launch.compiler_environment(parse_topology(topology))
    assert "\n" not in str(caught.value)


def test_the_child_answers_in_messages() -> None:
    """The real one, with a model that is refused before anything is compiled."""
    done = subprocess.run(
        launch.COMMAND,
        input=msgspec.json.encode(make_request("llama-3.3-70b", "v5e:2x2")),
        capture_output=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    message = json.loads(line)
    assert message["type"] == "failed"
    assert "does not fit v5e:2x2" in message["text"]


def test_the_command_line_needs_no_jax() -> None:
    program = (
        "import sys\n"
        "import jaxserve.plan.launch, jaxserve.plan.report, jaxserve.cli.plan\n"
        "assert not {'jax', 'flax', 'jaxserve.engine'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- what is printed ---


def test_the_report_has_every_number() -> None:
    text = to_text(make_finished_plan(), WHERE, price=2.7)
    for words in (
        "m on v6e:2x4: 1.00 billion parameters",
        "4 and 8 layers, and from these what 32 take (--exact compiles all)",
        "weights                300.0",
        "temporaries             40.0",
        "programs                30.0",
        "KV pool                512.0",
        "262,144 tokens, 128 users of 2,048 tokens each",
        "all-reduce              65          3.0 MiB together",
        "AT LEAST 10.00 ms",
        "memory decides",
        "12,800 output tokens a second, 1,600 per chip",
        "at 2.7 per chip-hour a million output tokens cost AT LEAST 0.469",
        "https://cloud.google.com/tpu/docs/v6e",
    ):
        assert words in text
    assert "does not fit" not in text
    assert "WARNING" not in text


def test_the_report_says_what_is_not_so() -> None:
    few = Capacity(num_pages=100, page_bytes=100, num_tokens=1584, users=50)
    exact = Compiled(
        depths=(32,), num_layers=32, num_programs=3, num_served=12, in_place=False, seconds=600.0
    )
    plan = make_finished_plan(
        capacity=few, compiled=exact, fits_at=None, num_devices=4, num_chips=4
    )
    text = to_text(plan, WHERE, price=None)
    assert "does not fit: 128 such users at once; no v6e holds them" in text
    assert "all 32 layers" in text
    assert "copies the KV pool" in text
    assert "uses 4 of the slice's 8 chips" in text
    assert "per chip-hour" not in text


def test_the_report_says_how_weights_are_stored() -> None:
    plan = make_finished_plan(weight_form="int8_token", product_dtype="int8")
    text = to_text(plan, WHERE, price=None)
    assert "bfloat16, weights int8_token, KV pages bfloat16" in text
    assert "operations at 1,836 a second" in text


def test_json_has_all_of_it() -> None:
    made = json.loads(json.dumps(to_json(make_finished_plan(), WHERE, price=2.7)))
    assert made["memory"]["pool"] == 512 * MEBIBYTE
    assert made["bound"]["seconds"] == 0.010
    assert made["price_per_million_output_tokens_at_bound"] == pytest.approx(0.46875)
    assert made["chip"]["sources"]["hbm_bytes"].startswith("32 GB")
    assert made["holds_all"]


@pytest.mark.parametrize(("users", "code"), [(128, 0), (127, 1)])
def test_the_exit_code_says_whether_all_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], users: int, code: int
) -> None:
    seen = []

    def run_plan(request: PlanRequest, *arguments: object, **settings: object) -> Plan:
        seen.append(request)
        capacity = Capacity(num_pages=9, page_bytes=9, num_tokens=9, users=users)
        return make_finished_plan(capacity=capacity)

    monkeypatch.setattr(launch, "run_plan", run_plan)
    assert (
        main(["plan", "m", "--topology", "v6e:2x4", "--kv-cache-dtype", "int8", "--json"]) == code
    )
    assert json.loads(capsys.readouterr().out)["capacity"]["users"] == users
    assert seen == [make_request("m", kv_cache_dtype="int8")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v6e:3x3"], "--topology is 'v6e:3x3'; there are v6e:1x1"),
        (["--topology", "a100:8"], "the chips are v5e"),
        (["--topology", "v6e:2x4", "--max-seqs", "0"], "--max-seqs is 0; it must be at least 1"),
        (["--topology", "v6e:2x4", "--context", "1"], "--context is 1; it must be at least 2"),
        (["--topology", "v6e:2x4", "--price", "-1"], "--price is -1.0"),
        (["--topology", "v6e:2x4", "--price", "nan"], "--price is nan"),
        (["--topology", "v6e:2x4", "--page-size", "24"], "--page-size is 24"),
        (["--topology", "v6e:2x4", "--tensor-parallel", "0"], "--tensor-parallel is 0"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["plan", "llama-3.1-8b", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_defaults() -> None:
    options = make_parser().parse_args(["plan", "m", "--topology", "v6e:2x4"])
    assert verb._read_config(options, 8) == make_request("m").config
