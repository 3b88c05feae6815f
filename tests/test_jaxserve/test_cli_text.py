"""generate, chat, batch and convert with a tiny model: what a user sees."""

from __future__ import annotations

import collections
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tiny_chat_model import write_tiny_chat_model

from jaxserve.cli import chat, generate
from jaxserve.cli.main import main
from jaxserve.errors import RequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams

ROOT = pathlib.Path(__file__).parents[2]
SMALL: dict[str, int | str] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 128,
    "num_pages": 64,
    "kernels": "reference",
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """One cache of compiled programs for all tests here, also for processes that they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSERVE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def llm(model: pathlib.Path) -> LLM:
    return LLM(str(model), **SMALL)


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The verbs get this model without loading it again."""
    for module in (generate, chat):
        monkeypatch.setattr(module, "load_llm", lambda config, debug: llm)
    return llm


class Typed(io.TextIOWrapper):
    """Standard input through a pipe."""

    def __init__(self, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        super().__init__(io.BytesIO(data), encoding="utf-8")


def test_generate_loads_the_model_and_streams_its_text(
    model: pathlib.Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = llm.generate("abc", GREEDY)
    arguments = ["generate", "abc", "--model", str(model), "--temperature", "0", *FLAGS]
    assert main([*arguments, "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == f"{whole.text}\n"


def test_generate_reads_standard_input(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = loaded.generate("über\n", GREEDY)
    monkeypatch.setattr(sys, "stdin", Typed("über\n"))
    assert main(["generate", "-", "--temperature", "0", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == f"{whole.text}\n"


def test_generate_refuses_input_that_is_no_text(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed(b"\xff\xfe"))
    assert main(["generate", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_generate_can_ask_through_the_chat_template(
    loaded: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = loaded.chat([{"role": "user", "content": "abc"}], GREEDY)
    assert main(["generate", "abc", "--chat", "--temperature", "0", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == f"{whole.text}\n"


def test_a_prompt_that_is_too_long_is_one_line(
    loaded: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x" * 500]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the prompt has 501 tokens")
    assert error.count("\n") == 1


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", Typed(text))
    return main(["chat", "--temperature", "0", "--max-tokens", "12", *arguments])


def reply(llm: LLM, *texts: str) -> str:
    """The greedy answer to a conversation that begins with the user."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return llm.chat(messages, GREEDY)[0].text


def test_chat_keeps_the_conversation_until_reset(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = reply(loaded, "one")
    second = reply(loaded, "one", first, "two")
    alone = reply(loaded, "two")
    assert second != alone
    assert talk(monkeypatch, "one\n\ntwo\n/reset\ntwo") == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n{alone}\n"


def test_chat_takes_instructions(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": "be odd"}, {"role": "user", "content": "one"}]
    expected = loaded.chat(messages, GREEDY)[0].text
    assert expected != reply(loaded, "one")
    assert talk(monkeypatch, "one\n/reset\none\n", "--system", "be odd") == 0
    assert capsys.readouterr().out == 2 * f"{expected}\n"


def test_chat_has_commands(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "/help\n/fly\n/quit\nnever asked\n") == 0
    shown = capsys.readouterr()
    assert shown.out == f"{chat.HELP}\n"
    assert shown.err == "/fly is no command; /help lists them\n"


def test_chat_outlives_a_question_that_is_too_long(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "x" * 500 + "\none\n") == 0
    shown = capsys.readouterr()
    assert "error: the prompt has" in shown.err
    assert shown.out == f"{reply(loaded, 'one')}\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = reply(loaded, "one")
    asked: list[list[dict[str, str]]] = []
    original = loaded.stream_chat

    def interrupted(messages: list[dict[str, str]], sampling: SamplingParams) -> Iterator[object]:
        asked.append(messages)
        for number, piece in enumerate(original(messages, sampling)):
            if len(asked) == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(loaded, "stream_chat", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert talk(monkeypatch, "one\ntwo\n") == 0
    assert signal.getsignal(signal.SIGINT) is before
    shown = capsys.readouterr()
    cut = asked[1][1]["content"]
    assert shown.out.startswith(f"{cut}\n")
    assert shown.err == " [stopped]"
    assert whole.startswith(cut)
    assert cut != whole
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]
    assert not loaded._engine.has_work or loaded._engine.num_requests == 0


def test_a_second_ctrl_c_leaves_at_once() -> None:
    with chat._interruptible() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_model_without_a_template_cannot_chat(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(messages: object) -> list[int]:
        raise RequestError("this model has no chat template", param="messages")

    monkeypatch.setattr(loaded, "chat_prompt", refuse)
    assert talk(monkeypatch, "one\n") == 1
    assert capsys.readouterr().err == "error: this model has no chat template\n"


def test_convert_writes_a_checkpoint_that_answers_the_same(
    model: pathlib.Path, llm: LLM, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "orbax"
    assert main(["convert", str(model), str(target)]) == 0
    assert f"jaxserve serve {target}" in capsys.readouterr().err
    arguments = ["generate", "abc", "--model", str(target), "--temperature", "0", *FLAGS]
    assert main([*arguments, "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == f"{llm.generate('abc', GREEDY)[0].text}\n"
    assert main(["convert", str(model), str(target)]) == 1  # not empty


def batch_lines(number: int) -> str:
    lines = []
    for n in range(number):
        body = {"prompt": f"{n}", "max_tokens": 8 + n % 40, "temperature": 0, "ignore_eos": True}
        lines.append(
            {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        )
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def test_batch_killed_at_half_time_goes_on(
    model: pathlib.Path,
    llm: LLM,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = 300
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(batch_lines(number) + '{"custom_id": "bad", "method": "POST"\n')
    arguments = ["batch", str(source), str(target), "--model", str(model), *FLAGS]
    arguments += ["--served-name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    _wait_for_half(target, number // 2, process)
    process.kill()
    process.wait()
    half = target.read_bytes().count(b"\n")
    assert 0 < half < number, "it was not killed in the middle"
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert f"{number + 1 - half} lines, 1 of them errors" in said
    assert "tok/s" in said
    answers = [json.loads(line) for line in target.open()]
    counts = collections.Counter(answer["custom_id"] for answer in answers)
    assert counts == {None: 1, **{str(n): 1 for n in range(number)}}
    by_id = {answer["custom_id"]: answer for answer in answers}
    for n in (0, 1, 150, 299):
        body = by_id[str(n)]["response"]["body"]
        sampling = SamplingParams(max_tokens=8 + n % 40, temperature=0, ignore_eos=True)
        assert body["choices"][0]["text"] == llm.generate(str(n), sampling)[0].text
        assert body["model"] == "tiny"
    assert main(arguments) == 0
    assert f"all {number + 1} answers already" in capsys.readouterr().err


def _wait_for_half(path: pathlib.Path, half: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists() or path.read_bytes().count(b"\n") < half:
        if process.poll() is not None:
            assert process.stderr is not None
            pytest.fail(f"the batch ended too early: {process.stderr.read().decode()}")
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_batch_does_not_answer_into_its_input(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(batch_lines(2))
    assert main(["batch", str(source), str(source)]) == 2
    assert "is the input, too" in capsys.readouterr().err
    assert source.read_text() == batch_lines(2)
