"""Flags made from the settings' dataclasses: names, types and defaults are theirs alone.

Only what a flag is for stands here; a test fails if a field has no text or a text no field.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxserve.config import (
    DEFAULT_ITL_TARGET_MS,
    DEFAULT_MAX_LEN,
    DISTRIBUTED,
    DTYPES,
    EMBEDDINGS,
    KV_CACHE_DTYPES,
    LOG_LEVELS,
    REASONING_PARSERS,
    SPECULATIVE,
    TOOL_PARSERS,
    EngineConfig,
    HostsConfig,
    ServerConfig,
)
from jaxserve.errors import UsageError
from jaxserve.request import SamplingParams

ENGINE_HELP: Mapping[str, str] = {
    "model": "a name that can be pulled, a folder, a GGUF file or a hub id",
    "served_name": "the model's name in the API, if not what --model says",
    "dtype": "of weights and activations: auto is float32 on a CPU, else bfloat16",
    "quantization": "how matrices are stored: none (as --dtype says), the name of a scheme such as "
    "int8_group32_a16, or auto: on a CPU 4 or 8 bits, unless --dtype is given",
    "kv_cache_dtype": "of the KV pages: auto is that of --dtype, and bfloat16 where --quantization auto "
    "makes weights small; int8 and fp8 hold each token's head with a scale of its own",
    "max_num_seqs": "answers that grow at the same time",
    "max_num_batched_tokens": "tokens that one step computes, of all requests together",
    "max_model_len": "longest prompt and answer together, in tokens; if not given, the model's own "
    f"limit, at most {DEFAULT_MAX_LEN}",
    "page_size": "tokens in one page of the KV pool, a power of two",
    "num_pages": "pages of the KV pool; if not given, what --kv-memory-bytes holds",
    "kv_memory_bytes": "size of the KV pool, as in 2000000000 or 2G; if not given, a share of the "
    "free memory",
    "tensor_parallel": "devices over which each layer is split",
    "prefix_caching": "keep the KV pages of prompts for later prompts that begin alike",
    "async_scheduling": "start a step before the last one's tokens have been read",
    "max_queue_len": "requests that may wait; more are refused",
    "max_queued_tokens": "prompt tokens that may wait; more are refused",
    "itl_target_ms": "milliseconds between two tokens of an answer that prompts computed beside it "
    "should keep to, by shorter chunks; 0 for chunks as long as a step allows; if not given, "
    f"{DEFAULT_ITL_TARGET_MS:g} in a server and 0 offline",
    "random_weights": "make weights up instead of reading them, to measure speed",
    "speculative": "ngram guesses an answer's next tokens from what followed the same words before, "
    "where confirming guesses pays; the answers stay the same",
    "num_speculative_tokens": "guesses for one answer in one step, at most",
    "embeddings": "off, or how /v1/embeddings pools hidden states where a request does not say: mean "
    "or last",
    "prompt_logprobs": "make log-probabilities of prompts available (prompt_logprobs, and echo with "
    "logprobs)",
    "kernels": "auto for the fastest implementations that work here, reference for plain jnp",
}
SERVER_HELP: Mapping[str, str] = {
    "host": "address to listen on; 0.0.0.0 for all of this machine's",
    "port": "port to listen on; 0 for any that is free",
    "workers": "front-end processes, which parse, tokenise and stream",
    "max_body_bytes": "largest request body",
    "max_prompt_bytes": "longest text of one request's prompts, in UTF-8 bytes",
    "max_n": "answers (n) that one prompt may ask for",
    "max_stop": "stop strings in one request",
    "max_stop_bytes": "size of a request's stop strings together",
    "data_dir": "folder for uploaded files, batches and stored responses; if not given, jaxserve's "
    "in the user's state folder",
    "max_file_bytes": "largest uploaded file",
    "max_data_bytes": "all that may be kept in --data-dir together",
    "api_keys": "file of API keys, as `jaxserve keys` writes it; nothing but /health and /ready is "
    "answered without a key then",
    "usage_ledger": "keep a row for every request in --data-dir, for /v1/usage and `jaxserve usage`",
    "trace_requests": "how many of the last requests can be looked at step by step; 0 for none",
    "otlp_endpoint": "send every request's spans to this URL of an OpenTelemetry collector, as OTLP "
    "over HTTP, such as http://127.0.0.1:4318/v1/traces",
    "price_per_device_hour": "price of an hour of the device's time, which requests share",
    "price_per_million_prompt_tokens": "price of a million tokens of prompts",
    "price_per_million_cached_tokens": "price of a million of those that were in the prefix cache; "
    "if not given, that of other prompt tokens",
    "price_per_million_generated_tokens": "price of a million tokens of answers",
    "tool_parser": "how the model writes calls of tools: auto looks at its chat template",
    "reasoning_parser": "how the model's thoughts stand in its answers: auto looks at its chat "
    "template, deepseek is <think>...</think>",
    "drain_seconds": "how long open answers may take to finish after SIGTERM",
    "log_level": "how much the server says",
}
HOSTS_HELP: Mapping[str, str] = {
    "distributed": "auto asks the cluster (Cloud TPU, Slurm, ...) for the three settings below; the "
    "same command then runs on every host",
    "num_processes": "hosts that run one engine together, one process on each",
    "process_id": "which of them this is, from 0; process 0 leads, the others only follow it",
    "coordinator_address": "HOST:PORT of process 0, as the others reach it; the port after it is "
    "used, too",
    "join_seconds": "how long the processes wait for each other at the start",
}
SAMPLING_HELP: Mapping[str, str] = {
    "max_tokens": "longest answer; if not given, until the model stops or the context is full",
    "min_tokens": "tokens before the answer may end",
    "temperature": "0 always takes the likeliest token; higher is more varied",
    "top_k": "choose among this many of the likeliest tokens; 0 for all",
    "top_p": "choose among the likeliest tokens that together have this probability",
    "min_p": "leave out tokens below this share of the likeliest one's probability",
    "repetition_penalty": "above 1 makes tokens of prompt and answer less likely",
    "presence_penalty": "above 0 makes tokens of the answer less likely",
    "frequency_penalty": "the same, each time a token has appeared",
    "seed": "makes the answer repeatable; if not given, a random one",
    "stop": "end the answer before this text; may be given several times",
    "ignore_eos": "go on when the model would stop",
}
_CHOICES: Mapping[str, Collection[str]] = {
    "distributed": DISTRIBUTED,
    "dtype": DTYPES,
    "embeddings": EMBEDDINGS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "log_level": LOG_LEVELS,
    "speculative": SPECULATIVE,
}
_UNITS: Mapping[str, int] = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Settings = TypeVar("Settings", EngineConfig, ServerConfig, SamplingParams)


def add_model_flags(
    parser: argparse.ArgumentParser, *, without: Collection[str] = (), positional: bool = False
) -> None:
    """A flag for every field of EngineConfig. positional: the model may also stand alone."""
    if positional:
        parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="same as --model")
    group = parser.add_argument_group("model and engine")
    _add_flags(group, EngineConfig, ENGINE_HELP, without)


def add_server_flags(parser: argparse.ArgumentParser, *, only: Collection[str] = ()) -> None:
    """A flag for every field of ServerConfig, or for those in `only`."""
    without = SERVER_HELP.keys() - set(only) if only else ()
    _add_flags(parser.add_argument_group("server"), ServerConfig, SERVER_HELP, without)


def add_hosts_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of HostsConfig; JAXSERVE_NUM_PROCESSES etc. stand in for them."""
    group = parser.add_argument_group(
        "several hosts", "each also read from the environment, as in JAXSERVE_NUM_PROCESSES"
    )
    _add_flags(group, HostsConfig, HOSTS_HELP, ())


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the fields of SamplingParams that make sense for one text at a time."""
    _add_flags(parser.add_argument_group("sampling"), SamplingParams, SAMPLING_HELP, ())


def read_engine_config(options: argparse.Namespace) -> EngineConfig:
    """The checked EngineConfig of a verb with model flags. Raises UsageError."""
    alone = getattr(options, "model_argument", None)
    if alone is not None:
        if options.model is not None and options.model != alone:
            raise UsageError(f"the model is given twice: {alone} and --model {options.model}")
        options.model = alone
    config = _read(options, EngineConfig)
    config.validate()
    return config


def read_server_config(options: argparse.Namespace) -> ServerConfig:
    """The checked ServerConfig of a verb with server flags. Raises UsageError."""
    config = _read(options, ServerConfig)
    config.validate()
    return config


def read_hosts_config(options: argparse.Namespace) -> HostsConfig:
    """The checked HostsConfig of a verb with hosts flags, which win over the environment.

    Raises UsageError.
    """
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(HostsConfig)}
    config = dataclasses.replace(
        HostsConfig.from_environment(),
        **{name: value for name, value in given.items() if value is not None},
    )
    config.validate()
    return config


def read_sampling(options: argparse.Namespace) -> SamplingParams:
    """The checked SamplingParams of a verb with sampling flags. Raises RequestError."""
    sampling = _read(options, SamplingParams)
    sampling.validate()
    return sampling


def _read(options: argparse.Namespace, kind: type[Settings]) -> Settings:
    """Flags that were not given are None here, so that the dataclass's default holds."""
    names = (field.name for field in dataclasses.fields(kind))
    given = {name: getattr(options, name, None) for name in names}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _add_flags(
    group: argparse._ArgumentGroup,
    kind: type[Any],
    texts: Mapping[str, str],
    without: Collection[str],
) -> None:
    hints = typing.get_type_hints(kind)
    defaults = {field.name: _default(field) for field in dataclasses.fields(kind)}
    for name, text in texts.items():
        if name not in without:
            _add_flag(group, name, hints[name], defaults[name], text)


def _add_flag(
    group: argparse._ArgumentGroup, name: str, hint: Any, default: Any, text: str
) -> None:
    flag = f"--{name.replace('_', '-')}"
    shown = "" if default in (None, []) else f" (default: {default})"
    if hint is bool:
        shown = f" (default: {'on' if default else 'off'})"
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, default=None, help=text + shown)
        return
    base = _base_type(hint)
    settings: dict[str, Any] = {"action": "append"} if base is list else {}
    parse = str if base is list else base
    if name.endswith("_bytes"):
        parse = size_in_bytes
    group.add_argument(
        flag,
        type=parse,
        default=None,
        choices=_CHOICES.get(name),
        metavar=_metavar(parse) if name not in _CHOICES else None,
        help=(text + shown).replace("%", "%%"),
        **settings,
    )


def size_in_bytes(text: str) -> int:
    """2000000000, 2G or 512M. Raises ValueError, which argparse turns into a usage error."""
    unit = _UNITS.get(text[-1:].upper())
    return int(text) if unit is None else int(float(text[:-1]) * unit)


size_in_bytes.__name__ = "size"  # argparse shows it: "invalid size value: 'x'"


def _base_type(hint: Any) -> Any:
    """`int | None` -> int, `list[str]` -> list."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def _metavar(parse: Any) -> str:
    names = {str: "TEXT", int: "N", float: "X", size_in_bytes: "BYTES"}
    return names[parse]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
