"""All settings, as small frozen dataclasses. A default is written here and nowhere else.

This module imports neither jax nor the engine: front-end workers read it, too.
Environment variables are read in `from_environment` functions only.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import UsageError

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16")
#: What --kv-cache-dtype may say, and the dtype of the pages; auto follows --dtype.
KV_CACHE_DTYPES = {
    "auto": "",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}
LOG_LEVELS = ("debug", "info", "warning", "error")
DISTRIBUTED = ("off", "auto")
EMBEDDINGS = ("off", "mean", "last")
SPECULATIVE = ("off", "ngram")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; `scaling` as in Hugging Face's `rope_scaling`.

    rotary_dim: how many of the head's dimensions are rotated (the leading ones).
    interleaved: pairs are neighbours (0,1), (2,3) instead of halves (i, i + rotary_dim / 2).
    """

    theta: float
    rotary_dim: int
    scaling_type: str = "default"
    scaling: dict[str, float | int | bool | list[float]] = dataclasses.field(
        default_factory=dict,
        hash=False,  # a dict has no hash; equality compares it
    )
    interleaved: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer: window (None: full causal) and rope (None: NoPE)."""

    window: int | None
    rope: RopeConfig | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model, read from its own config by the family's reader.

    Sizes follow the letters of ARCHITECTURE.md: D hidden_size, N num_heads, K num_kv_heads,
    H head_size, F ffn_size, V vocab_size, L num_layers.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    max_position: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # 1.0: weights are stored minus one (Gemma)
    tie_embeddings: bool = False
    attention_bias: bool = False  # q, k and v
    attention_out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # norms after attention and ffn as well (Gemma)
    activation: str = "silu"  # or "gelu_tanh", "gelu"
    attention_scale: float | None = None  # None: head_size ** -0.5
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    max_num_seqs: slots of the running batch. max_num_batched_tokens: query tokens of one step.
    max_model_len: prompt + answer, None for the model's own limit (at most `DEFAULT_MAX_LEN`).
    kv_memory_bytes: size of the page pool, None for a share of what is free. num_pages overrides it.
    max_queue_len and max_queued_tokens bound what waits; beyond them requests are refused.
    itl_target_ms: what the time between two tokens of an answer should stay below while prompts
    are computed beside it; 0 for steps as large as they can be, None for `DEFAULT_ITL_TARGET_MS` in
    a server, and 0 offline, where nobody waits for single tokens.
    embeddings: how hidden states are pooled where a request does not say, off for no embeddings.
    speculative: what guesses tokens, num_speculative_tokens: the most per answer and step.
    """

    model: str = DEFAULT_MODEL
    served_name: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_bytes: int | None = None
    tensor_parallel: int = 1
    prefix_caching: bool = True
    async_scheduling: bool = True
    max_queue_len: int = 2048
    max_queued_tokens: int = 2_000_000
    itl_target_ms: float | None = None
    random_weights: bool = False
    kernels: str = "auto"
    embeddings: str = "off"
    prompt_logprobs: bool = False
    speculative: str = "ngram"
    num_speculative_tokens: int = 15

    @property
    def max_step_rows(self) -> int:
        """Sequences of one step, or positions at which it samples, whichever may be more."""
        guesses = self.num_speculative_tokens if self.speculative != "off" else 0
        return max(self.max_num_seqs, 1 + guesses)

    @property
    def model_name(self) -> str:
        """The name that requests, answers and metrics use; of a path only its last part."""
        if self.served_name:
            return self.served_name
        path = pathlib.PurePath(self.model)
        if self.model.startswith(("/", ".", "~")) or path.suffix in (".gguf", ".safetensors"):
            return path.stem if path.suffix in (".gguf", ".safetensors") else path.name
        return self.model

    def validate(self) -> None:
        """Raises UsageError naming the flag to change."""
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("page_size", 1),
            ("tensor_parallel", 1),
            ("max_queue_len", 1),
            ("max_queued_tokens", 1),
            ("num_speculative_tokens", 1),
        ):
            value = getattr(self, name)
            if value < low:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}; it must be at least {low}"
                )
        for name in ("max_model_len", "num_pages", "kv_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least 2")
        if self.itl_target_ms is not None and not 0 <= self.itl_target_ms < math.inf:
            raise UsageError(f"--itl-target-ms is {self.itl_target_ms}; it must be at least 0")
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UsageError(
                f"--kv-cache-dtype is {self.kv_cache_dtype!r}; "
                f"it must be one of {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.speculative not in SPECULATIVE:
            raise UsageError(
                f"--speculative is {self.speculative!r}; it must be one of {', '.join(SPECULATIVE)}"
            )
        if self.embeddings not in EMBEDDINGS:
            raise UsageError(
                f"--embeddings is {self.embeddings!r}; it must be one of {', '.join(EMBEDDINGS)}"
            )
        if self.page_size & (self.page_size - 1):
            raise UsageError(f"--page-size is {self.page_size}; it must be a power of two")


DEFAULT_MAX_LEN = 8192
DEFAULT_ITL_TARGET_MS = 100.0
#: How a model may write calls of tools, and what it thinks; auto asks its chat template.
TOOL_PARSERS = (
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_args",
    "gemma",
    "functiongemma",
)
REASONING_PARSERS = ("auto", "none", "deepseek")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side. `workers` front-end processes share one engine.

    data_dir: folder for files, batches and stored responses, None for `state_folder`.
    max_file_bytes bounds one uploaded file, max_data_bytes all that is kept.
    api_keys: file of keys, None for a server that everybody may ask.
    usage_ledger: whether every request leaves a row in data_dir; trace_requests: how many of the
    last requests can be looked at step by step. Prices are in any currency; that of cached tokens is
    that of other prompt tokens if it is None. otlp_endpoint: URL of an OpenTelemetry collector.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_body_bytes: int = 8 * 2**20
    max_prompt_bytes: int = 4 * 2**20
    max_n: int = 16
    max_stop: int = 16
    max_stop_bytes: int = 1024
    drain_seconds: float = 30.0
    data_dir: str | None = None
    max_file_bytes: int = 200 * 2**20
    max_data_bytes: int = 10 * 2**30
    api_keys: str | None = None
    usage_ledger: bool = True
    trace_requests: int = 1000
    otlp_endpoint: str | None = None
    price_per_device_hour: float = 0.0
    price_per_million_prompt_tokens: float = 0.0
    price_per_million_cached_tokens: float | None = None
    price_per_million_generated_tokens: float = 0.0
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_level: str = "info"

    @property
    def data_folder(self) -> pathlib.Path:
        """Where files, batches and stored responses are kept; made when first needed."""
        return pathlib.Path(self.data_dir).expanduser() if self.data_dir else state_folder()

    def validate(self) -> None:
        """Raises UsageError naming the flag to change."""
        for flag, given, known in (
            ("--tool-parser", self.tool_parser, TOOL_PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if given not in known:
                raise UsageError(f"{flag} is {given!r}; it must be one of {', '.join(known)}")
        for name, low, high in (
            ("port", 0, 65535),
            ("workers", 1, 1024),
            ("max_body_bytes", 1, math.inf),
            ("max_prompt_bytes", 1, math.inf),
            ("max_n", 1, math.inf),
            ("max_stop", 0, math.inf),
            ("max_stop_bytes", 0, math.inf),
            ("drain_seconds", 0, 86400),
            ("max_file_bytes", 1, math.inf),
            ("max_data_bytes", 1, math.inf),
            ("trace_requests", 0, 10**6),
            ("price_per_device_hour", 0, math.inf),
            ("price_per_million_prompt_tokens", 0, math.inf),
            ("price_per_million_cached_tokens", 0, math.inf),
            ("price_per_million_generated_tokens", 0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limit = f"at least {low}" if high == math.inf else f"{low} to {high}"
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be {limit}")
        endpoint = self.otlp_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"--otlp-endpoint is {endpoint!r}; it must be an http or https URL, such as "
                "http://127.0.0.1:4318/v1/traces"
            )
        if self.log_level not in LOG_LEVELS:
            raise UsageError(
                f"--log-level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostsConfig:
    """One engine over several hosts: the same command runs on each, as process 0, 1, ...

    Process 0 leads: it serves, schedules and tells the others what to run. distributed "auto": what
    is not given is asked of the cluster (Cloud TPU, Slurm and the others that jax knows).
    coordinator_address: HOST:PORT of process 0; jax uses PORT, the leader's plans go over PORT + 1.
    """

    distributed: str = "off"
    num_processes: int | None = None
    process_id: int | None = None
    coordinator_address: str | None = None
    join_seconds: float = 300.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> HostsConfig:
        """What JAXSERVE_DISTRIBUTED, JAXSERVE_NUM_PROCESSES and so on say. Raises UsageError."""
        parsers: dict[str, Callable[[str], str | int | float]] = {
            "distributed": str,
            "num_processes": int,
            "process_id": int,
            "coordinator_address": str,
            "join_seconds": float,
        }
        given: dict[str, Any] = {}
        for name, parse in parsers.items():
            variable = f"JAXSERVE_{name.upper()}"
            text = environment.get(variable, "")
            try:
                given |= {name: parse(text)} if text else {}
            except ValueError:
                raise UsageError(f"{variable} is {text!r}; it must be a number") from None
        return cls(**given)

    @property
    def several(self) -> bool:
        """Whether there are other processes, all of them being known."""
        return (self.num_processes or 1) > 1

    @property
    def leads(self) -> bool:
        """Whether this process serves; the only one does, too."""
        return not self.several or self.process_id == 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        assert self.coordinator_address is not None
        host, _, port = self.coordinator_address.rpartition(":")
        return host.strip("[]"), int(port)

    def validate(self) -> None:
        """Raises UsageError naming the flag to change."""
        if self.distributed not in DISTRIBUTED:
            choices = ", ".join(DISTRIBUTED)
            raise UsageError(f"--distributed is {self.distributed!r}; it must be one of {choices}")
        if not self.join_seconds > 0:
            raise UsageError(f"--join-seconds is {self.join_seconds}; it must be above 0")
        if self.num_processes is not None and self.num_processes < 1:
            raise UsageError(f"--num-processes is {self.num_processes}; it must be at least 1")
        if self.distributed == "off":
            self._check_complete()
        if self.process_id is not None and self.num_processes is not None:
            self._check_process_id(self.process_id, self.num_processes)
        if self.coordinator_address is not None:
            self._check_address(self.coordinator_address)

    def _check_complete(self) -> None:
        given = (self.num_processes, self.process_id, self.coordinator_address)
        if self.num_processes == 1 or given == (None, None, None):
            return
        names = ("--num-processes", "--process-id", "--coordinator-address")
        missing = [name for name, value in zip(names, given, strict=True) if value is None]
        if missing:
            raise UsageError(
                f"{' and '.join(missing)} must be given as well for an engine over several hosts "
                "(or --distributed auto, where the cluster knows)"
            )

    def _check_process_id(self, process_id: int, num_processes: int) -> None:
        if not 0 <= process_id < num_processes:
            raise UsageError(
                f"--process-id is {process_id}; with --num-processes {num_processes} it must be "
                f"0 to {num_processes - 1}"
            )

    def _check_address(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65534:
            raise UsageError(
                f"--coordinator-address is {address!r}; it must be HOST:PORT of process 0, with a "
                "port of 1 to 65534"
            )


def hosts_token_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """`JAXSERVE_HOSTS_TOKEN`, which all processes of an engine must share; empty for none."""
    return environment.get("JAXSERVE_HOSTS_TOKEN", "")


def cache_folder() -> pathlib.Path:
    """Where pulled models and compiled programs are kept; `JAXSERVE_CACHE` overrides."""
    override = os.environ.get("JAXSERVE_CACHE")
    if override:
        return pathlib.Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "jaxserve"


def state_folder() -> pathlib.Path:
    """Where the server keeps what it must not forget; `JAXSERVE_STATE` overrides."""
    override = os.environ.get("JAXSERVE_STATE")
    if override:
        return pathlib.Path(override).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".local" / "state") / "jaxserve"
