"""Every setting has a flag with a text, and its default is the dataclass's."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from jaxserve.cli import flags
from jaxserve.cli.main import VERBS, make_parser
from jaxserve.config import EngineConfig, HostsConfig, ServerConfig
from jaxserve.errors import RequestError, UsageError
from jaxserve.request import SamplingParams

CONFIGS = [
    (EngineConfig, flags.ENGINE_HELP),
    (ServerConfig, flags.SERVER_HELP),
    (HostsConfig, flags.HOSTS_HELP),
]
#: Fields that make no sense for one text in a terminal.
NO_FLAG = {
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    "include_stop_str_in_output",
    "logprobs",
    "skip_special_tokens",
}


def verb_parsers() -> dict[str, argparse.ArgumentParser]:
    (verbs,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(verbs.choices)


def parse(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(arguments)


@pytest.mark.parametrize(("kind", "texts"), CONFIGS)
def test_every_field_has_a_flag_of_serve_with_a_text(kind: type, texts: dict[str, str]) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    assert texts.keys() == fields
    known = {option: action for action in _actions("serve") for option in action.option_strings}
    for name in fields:
        action = known[f"--{name.replace('_', '-')}"]
        assert texts[name] in (action.help or "").replace("%%", "%")
        assert len(texts[name]) > 10


def test_sampling_flags_cover_all_that_makes_sense_in_a_terminal() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert flags.SAMPLING_HELP.keys() == fields - NO_FLAG


def test_every_flag_of_every_verb_has_a_help_text() -> None:
    assert len(verb_parsers()) == len(VERBS)
    for verb in verb_parsers():
        for action in _actions(verb):
            assert action.help, f"{verb} {action.option_strings or action.dest}"


def _actions(verb: str) -> list[argparse.Action]:
    return verb_parsers()[verb]._actions


@pytest.mark.parametrize(("kind", "texts"), CONFIGS)
def test_the_help_prints_every_default(kind: Any, texts: dict[str, str]) -> None:
    words = " ".join(verb_parsers()["serve"].format_help().split()).replace("- ", "-")
    for field in dataclasses.fields(kind):
        if field.default is None:
            continue
        shown = field.default
        if isinstance(shown, bool):
            shown = "on" if shown else "off"
        text = texts[field.name].replace("- ", "-")
        assert f"{text} (default: {shown})" in words


def test_without_flags_the_dataclasses_decide() -> None:
    options = parse("serve")
    assert flags.read_engine_config(options) == EngineConfig()
    assert flags.read_server_config(options) == ServerConfig()
    assert flags.read_sampling(parse("generate", "x")) == SamplingParams()


def test_flags_reach_their_fields() -> None:
    options = parse(
        *["serve", "some/model", "--dtype", "bfloat16", "--max-num-seqs", "7", "--num-pages", "99"],
        *["--no-prefix-caching", "--random-weights", "--kv-memory-bytes", "1.5G", "--port", "0"],
        *["--drain-seconds", "2.5", "--log-level", "error", "--max-body-bytes", "64k"],
    )
    assert flags.read_engine_config(options) == EngineConfig(
        model="some/model",
        dtype="bfloat16",
        max_num_seqs=7,
        num_pages=99,
        prefix_caching=False,
        random_weights=True,
        kv_memory_bytes=1_500_000_000,
    )
    assert flags.read_server_config(options) == ServerConfig(
        port=0, drain_seconds=2.5, log_level="error", max_body_bytes=64_000
    )
    sampling = flags.read_sampling(
        parse("generate", "x", "--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos")
    )
    assert sampling == SamplingParams(temperature=0, stop=["a", "b"], ignore_eos=True)


def test_flags_of_hosts_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAXSERVE_PROCESS_ID", "1")
    options = parse("batch", "i", "o", "--process-id", "0", "--coordinator-address", "h:1")
    assert flags.read_hosts_config(options) == HostsConfig(
        num_processes=2, process_id=0, coordinator_address="h:1"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--page-size", "24"], "--page-size is 24"),
        (["--port", "70000"], "--port is 70000; it must be 0 to 65535"),
        (["--port", "-1"], "--port is -1"),
        (["--workers", "0"], "--workers is 0"),
        (["--drain-seconds", "nan"], "--drain-seconds is nan"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0; it must be at least 1"),
        (["a", "--model", "b"], "the model is given twice"),
    ],
)
def test_settings_that_cannot_work_name_their_flag(arguments: list[str], words: str) -> None:
    def read() -> None:
        options = parse("serve", *arguments)
        flags.read_engine_config(options)
        flags.read_server_config(options)

    with pytest.raises(UsageError, match=words):
        read()


def test_sampling_that_cannot_work_names_its_field() -> None:
    with pytest.raises(RequestError, match="top_p is 2"):
        flags.read_sampling(parse("generate", "x", "--top-p", "2"))


def test_the_same_model_twice_is_no_contradiction() -> None:
    assert flags.read_engine_config(parse("serve", "a", "--model", "a")).model == "a"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--max-num", "3"],  # no abbreviations
        ["serve", "--max-num-seqs", "many"],
        ["serve", "--kv-memory-bytes", "2X"],
        ["serve", "--kv-memory-bytes", "nanG"],
        ["serve", "--dtype", "int3"],
        ["generate"],
        ["batch", "in"],
        ["fly"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "--help" in error
