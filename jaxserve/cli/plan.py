"""`jaxserve plan MODEL --topology v6e:2x4`: what a model needs on chips that are not here."""

from __future__ import annotations

import argparse
import json
import math
import sys

from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.config import DTYPES, KV_CACHE_DTYPES, EngineConfig
from jaxserve.errors import UsageError

CONTEXT = 2048
MAX_SEQS = 128
#: What does not fit, though a plan could be made.
DOES_NOT_FIT = 1


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs, "plan", run, "compile for TPUs or GPUs that are not here, and say what would fit"
    )
    defaults = EngineConfig()
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a built-in shape (llama-3.1-8b, llama-3.3-70b, qwen2.5-7b, gemma-2-9b, "
        "smollm2-135m-instruct), a config.json, or what --model takes elsewhere; weights are not read",
    )
    add("--topology", metavar="CHIP:SHAPE", required=True, help="v6e:2x4, v5p:2x2x1, h100:8, ...")
    add(
        "--max-seqs", type=int, metavar="N", default=MAX_SEQS, help=_text("users at once", MAX_SEQS)
    )
    add(
        "--context",
        type=int,
        metavar="N",
        default=CONTEXT,
        help=_text("tokens of each user, prompt and answer together", CONTEXT),
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=defaults.max_num_batched_tokens,
        help=_text("tokens that one step computes", defaults.max_num_batched_tokens),
    )
    add(
        "--page-size",
        type=int,
        metavar="N",
        default=defaults.page_size,
        help=_text("tokens in one page of the KV pool", defaults.page_size),
    )
    add(
        "--dtype",
        choices=DTYPES,
        default=defaults.dtype,
        help="of weights and activations: auto is bfloat16 (default: auto)",
    )
    add(
        "--quantization",
        metavar="SCHEME",
        default=defaults.quantization,
        help=_text(
            "how matrices are stored: a scheme such as int8_token or int4_group128; none and, on "
            "accelerators, auto: as --dtype says",
            defaults.quantization,
        ),
    )
    add(
        "--kv-cache-dtype",
        "--kv-dtype",
        choices=tuple(KV_CACHE_DTYPES),
        default=defaults.kv_cache_dtype,
        help="of the KV pages: auto is that of --dtype (default: auto)",
    )
    add(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="devices over which each layer is split; if not given, all of the topology",
    )
    add(
        "--price",
        type=float,
        metavar="X",
        help="of a chip-hour; adds the price of a million tokens",
    )
    add("--exact", action="store_true", help="compile every layer, however long it takes")
    add("--json", action="store_true", help="print everything as JSON")


def _text(text: str, default: object) -> str:
    return f"{text} (default: {default})"


def run(options: argparse.Namespace) -> int:
    """Prints the plan. 0 if all users fit, 1 if they do not."""
    from jaxserve.plan.chips import parse_topology
    from jaxserve.plan.launch import run_plan
    from jaxserve.plan.messages import PlanRequest
    from jaxserve.plan.report import holds_all, to_json, to_text

    where = parse_topology(options.topology)
    request = PlanRequest(
        topology=str(where),
        config=_read_config(options, where.num_devices),
        all_devices=options.tensor_parallel is None,
        exact=options.exact,
    )
    plan = run_plan(request, where, _say, debug=options.debug)
    if options.json:
        print(json.dumps(to_json(plan, where, options.price), indent=2))
    else:
        print(to_text(plan, where, options.price))
    return 0 if holds_all(plan) else DOES_NOT_FIT


def _read_config(options: argparse.Namespace, num_devices: int) -> EngineConfig:
    """The engine's settings. Raises UsageError naming the flag of this verb."""
    for name, low in (("max_seqs", 1), ("context", 2), ("price", 0)):
        value = getattr(options, name)
        if value is not None and not (low <= value and math.isfinite(value)):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {value}; it must be at least {low}")
    split = num_devices if options.tensor_parallel is None else options.tensor_parallel
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        max_num_seqs=options.max_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.context,
        page_size=options.page_size,
        tensor_parallel=split,
    )
    config.validate()
    return config


def _say(text: str) -> None:
    print(f"{text}", file=sys.stderr, flush=True)
