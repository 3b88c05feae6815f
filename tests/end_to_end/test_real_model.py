"""The default model, from text to text: log-probabilities and greedy ids of an independent engine."""

import dataclasses
import json

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=10, max_tokens=48)


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    return LLM(
        str(smollm2_gguf),
        quantization="none",
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=512,
    )


@pytest.fixture(scope="module")
def prompts(data):
    return json.loads((data / "smollm2_greedy.json").read_text())["prompts"]


def test_greedy_answers_are_the_references(llm, prompts):
    answers = llm.generate([prompt["ids"] for prompt in prompts], GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        # After a near-tie another rounding may rightly go another way.
        sure = min([*prompt["near_tie_steps"], len(prompt["greedy_ids"])])
        assert answer.token_ids[:sure] == prompt["greedy_ids"][:sure], prompt["name"]
        assert len(answer.token_ids) == 48


def test_the_first_tokens_log_probabilities_are_the_references(llm, prompts):
    for prompt in prompts:
        last = prompt["last"]
        ids = prompt["ids"][: last["pos"] + 1]
        answer = llm.generate(ids, dataclasses.replace(GREEDY, max_tokens=1))[0]
        found = dict(zip(answer.logprobs[0].top_ids, answer.logprobs[0].top_logprobs, strict=True))
        for token, logprob in zip(last["ids"], last["logprobs"], strict=True):
            assert found[token] == pytest.approx(logprob, abs=2e-3), prompt["name"]


def test_a_chat_is_assembled_as_the_reference_does_and_answers_in_english(llm, prompts):
    chats = [prompt for prompt in prompts if "messages" in prompt]
    assert chats
    for prompt in chats:
        assert llm.chat_prompt(prompt["messages"]) == prompt["ids"]
    question = [
        {"role": "user", "content": "What is the capital of Japan? Answer in one sentence."}
    ]
    answer = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=30))[0]
    assert answer.text == "The capital of Japan is Tokyo."
    assert answer.finish_reason is FinishReason.STOP


def test_pieces_join_to_the_whole_and_a_stop_string_ends_it(llm):
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    whole = llm.generate("The capital of France is", sampling)[0].text
    pieces = list(llm.stream("The capital of France is", sampling))
    assert "".join(piece.text for piece in pieces) == whole
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    stop = whole[7:10]
    stopped = llm.generate("The capital of France is", dataclasses.replace(sampling, stop=[stop]))
    assert stopped[0].text == whole[: whole.index(stop)]
    assert stopped[0].stop_reason == stop
    assert llm.report.compilation.after_ready == 0
