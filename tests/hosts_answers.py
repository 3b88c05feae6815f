"""As a program: one process of a small engine that answers fixed requests; the leader prints them.

    python tests/hosts_answers.py FOLDER SETTINGS

Which process this is comes from the environment. SETTINGS: an EngineConfig as JSON, the model being
in FOLDER. The leader kills itself at the end, so that its follower sees a leader die.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys

import msgspec
from tiny_model import VOCAB

from jaxserve.config import EngineConfig, HostsConfig
from jaxserve.engine.build import make_engine
from jaxserve.engine.engine import Engine
from jaxserve.request import GenerationRequest, SamplingParams

ANSWERS = "answers: "

#: By name, what is sampled how; each in company of others like it.
SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
}


def requests(name: str) -> list[GenerationRequest]:
    """Prompts of one token to several chunks, the last like the first; answers of up to 24 tokens."""
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (50, 1, 30)]
    prompts.append([*prompts[0], 7])
    settings: dict[str, object] = {"ignore_eos": True, "logprobs": 2, **SAMPLINGS[name]}
    return [
        GenerationRequest(
            request_id=f"{name}-{number}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=rng.choice((8, 24)), seed=number, **settings),
        )
        for number, prompt in enumerate(prompts)
    ]


def answer_all(engine: Engine) -> dict[str, list[int]]:
    """Token ids by request; all of them at once, with more requests than slots and pages."""
    tokens: dict[str, list[int]] = {}
    for name in SAMPLINGS:
        for request in requests(name):
            tokens[request.request_id] = []
            engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


def main(folder: pathlib.Path, config: EngineConfig) -> None:
    hosts = HostsConfig.from_environment()
    if not hosts.leads:
        from jaxserve.cli.following import follow_leader

        follow_leader(hosts, config, "info")
        return
    from jaxserve.engine.hosts.lead import lead

    with lead(hosts, config) as others:
        engine, report = make_engine(config, folder, others)
        answers = answer_all(engine)
        facts = {
            "answers": answers,
            "compiled": report.compilation.after_ready,
            "devices": report.mesh.size,
            "preemptions": engine.scheduler.num_preemptions,
            "prefix_hits": engine.scheduler.num_prefix_hits,
        }
        print(ANSWERS + json.dumps(facts), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineConfig))
