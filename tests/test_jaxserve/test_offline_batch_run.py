"""Batch runs around a fake engine: every line once, whatever is in it and whatever happens."""

from __future__ import annotations

import collections
import json
import pathlib
import signal
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import batch_fakes
import pytest
from batch_fakes import AlphabetEngine, run_file

from jaxserve.errors import EngineError

ROOT = pathlib.Path(__file__).parents[2]


def line(number: int, **body: object) -> dict[str, Any]:
    body = {"prompt": f"{number:04}", "max_tokens": 1 + number * 7 % 20, **body}
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    }


def write_lines(path: pathlib.Path, lines: list[dict[str, Any] | str]) -> pathlib.Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read_answers(path: pathlib.Path) -> list[dict[str, Any]]:
    data = path.read_text()
    assert data.endswith("\n")
    return [json.loads(text) for text in data.splitlines()]


def answer_one(tmp_path: pathlib.Path, request: dict[str, Any] | str) -> dict[str, Any]:
    source = write_lines(tmp_path / "in.jsonl", [request])
    engine = AlphabetEngine()
    run_file(source, tmp_path / "out.jsonl", engine)
    assert engine.num_open == 0
    (answer,) = read_answers(tmp_path / "out.jsonl")
    return answer


def test_a_completion_is_answered_as_over_http(tmp_path: pathlib.Path) -> None:
    answer = answer_one(tmp_path, line(0, prompt="ab", max_tokens=4))
    assert answer.keys() == {"id", "custom_id", "response", "error"}
    assert answer["custom_id"] == "r0"
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["request_id"]
    body = answer["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "bytes"
    # <bos>ab are 3 tokens, so the alphabet begins at its fourth letter
    assert body["choices"] == [
        {
            "index": 0,
            "text": "defg",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4


def test_a_chat_is_answered_as_over_http(tmp_path: pathlib.Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}
    request = {**line(1), "url": "/v1/chat/completions", "body": body}
    answer = answer_one(tmp_path, request)["response"]["body"]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "lmn"  # 11 tokens of prompt
    assert answer["choices"][0]["finish_reason"] == "length"


def test_several_prompts_and_choices_are_one_answer(tmp_path: pathlib.Path) -> None:
    answer = answer_one(tmp_path, line(0, prompt=["a", "abc"], n=2, max_tokens=2))
    choices = answer["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == ["cd", "cd", "ef", "ef"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert answer["response"]["body"]["usage"]["prompt_tokens"] == 2 + 4


def test_a_stop_string_ends_an_answer_in_the_engine_too(tmp_path: pathlib.Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(0, prompt="ab", max_tokens=20, stop="fg")])
    engine = AlphabetEngine()
    count = run_file(source, tmp_path / "out.jsonl", engine)
    (answer,) = read_answers(tmp_path / "out.jsonl")
    choice = answer["response"]["body"]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("de", "stop")
    assert len(engine.aborted) == 1
    assert count.tokens == 4


BAD_LINES = [
    ("{", None, "invalid_json"),
    ("[]", None, "invalid_json"),
    ("\x00", None, "invalid_json"),
    ('{"custom_id": "r5"}', "r5", "missing_parameter"),
    ({**line(6), "method": "GET"}, "r6", "invalid_value"),
    ("x" * (batch_fakes.MAX_LINE + 1), None, "line_too_long"),
]
BAD_REQUESTS = [
    ({**line(7), "url": "/v1/embeddings"}, 404, "url"),
    ({**line(8), "body": []}, 400, None),
    ({**line(9), "body": {}}, 400, "prompt"),
    (line(10, max_tokenz=3), 400, "max_tokenz"),
    (line(11, temperature="hot"), 400, "temperature"),
    (line(12, temperature=-1), 400, "temperature"),
    (line(13, prompt="x" * 100), 400, "prompt"),
    (line(14, max_tokens=1000), 400, "max_tokens"),
    (line(15, model="another"), 404, "model"),
    (line(16, stream=True), 400, "stream"),
    (line(17, prompt=[999]), 400, "prompt"),
]


@pytest.mark.parametrize(("bad", "custom_id", "code"), BAD_LINES)
def test_a_line_that_is_no_request_gets_an_error(
    tmp_path: pathlib.Path, bad: dict[str, Any] | str, custom_id: str | None, code: str
) -> None:
    answer = answer_one(tmp_path, bad)
    assert answer["custom_id"] == custom_id
    assert answer["response"] is None
    assert answer["error"]["code"] == code
    assert answer["error"]["message"].startswith("line 1: ")


@pytest.mark.parametrize(("bad", "status", "param"), BAD_REQUESTS)
def test_a_request_that_is_refused_gets_the_http_error(
    tmp_path: pathlib.Path, bad: dict[str, Any], status: int, param: str | None
) -> None:
    answer = answer_one(tmp_path, bad)
    assert answer["custom_id"] == bad["custom_id"]
    assert answer["response"]["status_code"] == status
    error = answer["response"]["body"]["error"]
    assert error["param"] == param
    assert answer["error"] == {"code": error["code"], "message": error["message"]}


def test_bad_lines_never_stop_a_run(tmp_path: pathlib.Path) -> None:
    lines: list[dict[str, Any] | str] = []
    for number, (bad, *_) in enumerate([*BAD_LINES, *BAD_REQUESTS]):
        lines += [bad, line(100 + number), ""]
    lines.append(line(500, prompt="@fail@"))
    source = write_lines(tmp_path / "in.jsonl", lines)
    count = run_file(source, tmp_path / "out.jsonl", AlphabetEngine(), max_open=3)
    answers = read_answers(tmp_path / "out.jsonl")
    num_bad = len(BAD_LINES) + len(BAD_REQUESTS)
    assert len(answers) == count.lines == 2 * num_bad + 1
    assert count.failed == num_bad + 1
    assert sum(answer["error"] is None for answer in answers) == num_bad
    failed = next(answer for answer in answers if answer["custom_id"] == "r500")
    assert failed["response"]["status_code"] == 500
    assert "told to fail" in failed["error"]["message"]


def test_one_failing_prompt_of_several_ends_the_others(tmp_path: pathlib.Path) -> None:
    request = line(0, prompt=["fine", "@fail@", "fine too"])
    assert answer_one(tmp_path, request)["response"]["status_code"] == 500


def test_a_refusal_of_the_engine_ends_the_whole_line(tmp_path: pathlib.Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(0, prompt=["a", "b", "c"])])
    engine = AlphabetEngine(refuse_after=2)
    run_file(source, tmp_path / "out.jsonl", engine)
    (answer,) = read_answers(tmp_path / "out.jsonl")
    assert answer["response"]["status_code"] == 429
    assert engine.num_open == 0
    assert len(engine.aborted) == 2


def test_repeated_custom_ids_are_each_answered(tmp_path: pathlib.Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(1), line(1), line(1)])
    run_file(source, tmp_path / "out.jsonl", AlphabetEngine())
    before = (tmp_path / "out.jsonl").read_bytes()
    assert [answer["custom_id"] for answer in read_answers(tmp_path / "out.jsonl")] == ["r1"] * 3
    assert run_file(source, tmp_path / "out.jsonl", AlphabetEngine()).lines == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_memory_does_not_grow_with_the_file(tmp_path: pathlib.Path) -> None:
    def peak(number: int) -> int:
        source = write_lines(tmp_path / f"in{number}", [line(n % 1000) for n in range(number)])
        engine = AlphabetEngine()
        tracemalloc.start()
        run_file(source, tmp_path / f"out{number}", engine)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert engine.most_open <= 8
        assert len(read_answers(tmp_path / f"out{number}")) == number
        return size

    peak(50)  # what is loaded on first use
    assert peak(1000) < peak(200) + 50_000


def test_thousands_of_lines_are_each_answered_once(tmp_path: pathlib.Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(4000)])
    engine = AlphabetEngine()
    count = run_file(source, tmp_path / "out.jsonl", engine, max_open=64)
    assert count.lines == 4000
    assert engine.most_open == 64
    _assert_each_once(tmp_path / "out.jsonl", 4000)


def test_a_broken_engine_ends_the_run_and_open_lines_are_not_done(tmp_path: pathlib.Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(40)])
    engine = AlphabetEngine()
    engine.break_at_step = 12
    with pytest.raises(EngineError, match="three steps"):
        run_file(source, tmp_path / "out.jsonl", engine)
    done = read_answers(tmp_path / "out.jsonl")
    assert 0 < len(done) < 40
    assert all(answer["error"] is None for answer in done)
    run_file(source, tmp_path / "out.jsonl", AlphabetEngine())
    _assert_each_once(tmp_path / "out.jsonl", 40)


def test_lines_added_later_are_answered_by_the_same_command(tmp_path: pathlib.Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(5)])
    run_file(source, tmp_path / "out.jsonl", AlphabetEngine())
    write_lines(source, [line(n) for n in range(9)])
    assert run_file(source, tmp_path / "out.jsonl", AlphabetEngine()).lines == 4
    _assert_each_once(tmp_path / "out.jsonl", 9)


def test_kill_9_again_and_again_loses_and_repeats_nothing(tmp_path: pathlib.Path) -> None:
    number = 400
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(number)])
    target = tmp_path / "out.jsonl"
    target.touch()
    killed_at = []
    for share in (0.15, 0.4, 0.7):
        process = _start(source, target, pause=0.003)
        _wait_for_lines(target, int(share * number), process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        killed_at.append(len(target.read_bytes().splitlines()))
        with target.open("ab") as file:  # what a write that was cut short leaves
            file.write(b'{"id":"batch_req_17_0123')
    assert killed_at[0] < killed_at[1] < killed_at[2] < number
    assert _start(source, target, pause=0.0).wait() == 0
    _assert_each_once(target, number)


def _start(source: pathlib.Path, target: pathlib.Path, pause: float) -> subprocess.Popen[bytes]:
    program = [sys.executable, str(ROOT / "tests" / "test_jaxserve" / "batch_fakes.py")]
    paths = [str(ROOT), str(ROOT / "tests")]
    return subprocess.Popen(
        [*program, str(source), str(target), str(pause)],
        env={"PYTHONPATH": ":".join(paths), "PATH": ""},
    )


def _wait_for_lines(path: pathlib.Path, number: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _assert_each_once(path: pathlib.Path, number: int) -> None:
    answers = read_answers(path)
    counts = collections.Counter(answer["custom_id"] for answer in answers)
    assert counts == {f"r{n}": 1 for n in range(number)}
    for answer in answers:
        n = int(answer["custom_id"][1:])
        choice = answer["response"]["body"]["choices"][0]
        letters = [chr(97 + (5 + at) % 26) for at in range(1 + n * 7 % 20)]
        assert choice["text"] == "".join(letters)
