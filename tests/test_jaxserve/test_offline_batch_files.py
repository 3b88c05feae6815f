"""Lines in, answers out, and what a stopped run leaves."""

from __future__ import annotations

import io
import json
import pathlib
import tracemalloc

import pytest

from jaxserve.errors import RequestError, ResourceError
from jaxserve.offline.batch_input import (
    InputLine,
    find_custom_id,
    open_input,
    parse_line,
    read_lines,
)
from jaxserve.offline.batch_output import BatchOutput, DoneLines, answer_id

LINES = [
    InputLine(number=number, data=b"{}", digest=7919 * number + 2**63) for number in range(1, 6)
]


def write(output: BatchOutput, line: InputLine) -> None:
    output.write(line, custom_id=f"c{line.number}", response={"x": "y\n"}, error=None)


def test_lines_are_counted_with_empty_ones_and_empty_ones_are_no_requests() -> None:
    file = io.BytesIO(b'{"a": 1}\n\n  \r\n{"b": 2}\r\n{"c": 3}')
    lines = list(read_lines(file, 100))
    assert [(line.number, line.data) for line in lines] == [
        (1, b'{"a": 1}'),
        (4, b'{"b": 2}'),
        (5, b'{"c": 3}'),
    ]


def test_the_digest_does_not_depend_on_a_missing_last_newline() -> None:
    (ended,) = read_lines(io.BytesIO(b"abc\n"), 100)
    (torn,) = read_lines(io.BytesIO(b"abc"), 100)
    (other,) = read_lines(io.BytesIO(b"abd\n"), 100)
    assert ended.digest == torn.digest != other.digest


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_of_the_longest_length_is_read_and_a_longer_one_is_not(end: bytes) -> None:
    file = io.BytesIO(b"a" * 50 + b"\n" + b"b" * 51 + b"\n" + b"c" * 500 + b"\nok" + end)
    lines = list(read_lines(file, 50))
    assert [line.data for line in lines] == [b"a" * 50, None, None, b"ok"]
    assert [line.number for line in lines] == [1, 2, 3, 4]
    assert len({line.digest for line in lines}) == 4


def test_a_huge_line_takes_little_memory(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 30_000_000 + b'\n{"next": 1}\n')
    tracemalloc.start()
    with open_input(path) as file:
        lines = list(read_lines(file, 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.data for line in lines] == [None, b'{"next": 1}']
    assert peak < 2_000_000


GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_a_line_gives_its_url_and_its_body_as_text() -> None:
    request = parse_line(json.dumps(GOOD).encode())
    assert (request.custom_id, request.url) == ("a", "/v1/completions")
    assert json.loads(request.body) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"custom_id": None}, "custom_id", "must be a string"),
        ({"custom_id": 7}, "custom_id", "must be a string"),
        ({"method": "GET"}, "method", "must be POST"),
        ({"url": 3}, "url", "must be a string"),
        ({"extra": 1}, "extra", "unknown field 'extra'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_line(json.dumps({**GOOD, **change}).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(name: str) -> None:
    fields = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(RequestError, match=f"has no {name}") as caught:
        parse_line(json.dumps(fields).encode())
    assert caught.value.code == "missing_parameter"


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b"7", b"null", b'"x"', b"\xff\xfe", b"{}x", b"[" * 100_000]
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_line(data)
    assert caught.value.code == "invalid_json"
    assert find_custom_id(data) is None


def test_the_custom_id_of_a_wrong_line_is_found() -> None:
    assert find_custom_id(b'{"custom_id": "z", "url": 1}') == "z"


def test_done_lines_are_remembered() -> None:
    done = DoneLines()
    for number in (5, 1, 1000, 8):
        done.add(number, 2**63 + number)
    assert [n for n in range(1, 2000) if n in done] == [1, 5, 8, 1000]
    assert done.count == 4
    assert done.digest_sum == (4 * 2**63 + 1014) % 2**64


def test_a_second_run_knows_what_is_done(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, max_number=5) as output:
        assert output.done.count == 0
        for line in (LINES[3], LINES[0], LINES[2]):
            write(output, line)
    with BatchOutput(path, max_number=5) as output:
        assert [line.number in output.done for line in LINES] == [True, False, True, True, False]
        assert output.check_input(LINES) == 5


@pytest.mark.parametrize("cut", [1, 2, 5, 17, 18, 30, 60])
def test_a_torn_last_line_is_cut_off(tmp_path: pathlib.Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, max_number=5) as output:
        write(output, LINES[0])
        whole = path.read_bytes()
        write(output, LINES[1])
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:cut])
    with BatchOutput(path, max_number=5) as output:
        assert path.read_bytes() == whole
        assert [line.number in output.done for line in LINES] == [True, *[False] * 4]
        write(output, LINES[1])
    assert [json.loads(text)["custom_id"] for text in path.open()] == ["c1", "c2"]


@pytest.mark.parametrize(
    "text",
    [
        b"my diary, without an end of line",
        b"my diary\n",
        b'{"custom_id": "a"}\n',
        b'{"id":"batch_req_6_0000000000000000","custom_id":"c"}\n',  # no such line
        b'{"id":"batch_req_0_0000000000000000","custom_id":"c"}\n',
        b'{"id":"batch_req_1_0000000000000000","custom_id":"c\n',
        2 * b'{"id":"batch_req_1_0000000000000000","custom_id":"c"}\n',
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: pathlib.Path, text: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(text)
    with pytest.raises(ResourceError, match="is no answer to a line of this input"):
        BatchOutput(path, max_number=5)
    assert path.read_bytes() == text


def test_answers_to_another_input_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, max_number=5) as output:
        write(output, LINES[0])
    other = [InputLine(number=line.number, data=b"{}", digest=1) for line in LINES]
    with (
        BatchOutput(path, max_number=5) as output,
        pytest.raises(ResourceError, match="answers to other lines"),
    ):
        output.check_input(other)
    with (
        BatchOutput(path, max_number=5) as output,
        pytest.raises(ResourceError, match="answers to other lines"),
    ):
        output.check_input(LINES[1:])  # line 1 has become an empty one


def test_two_runs_do_not_share_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        BatchOutput(path, max_number=5),
        pytest.raises(ResourceError, match="another run is writing"),
    ):
        BatchOutput(path, max_number=5)
    BatchOutput(path, max_number=5).__exit__()


def test_files_that_cannot_be_used_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot read .*nowhere"):
        open_input(tmp_path / "nowhere")
    with pytest.raises(ResourceError, match="cannot read"):
        open_input(tmp_path)
    with pytest.raises(ResourceError, match=r"cannot write .*nowhere"):
        BatchOutput(tmp_path / "nowhere" / "out", max_number=5)
    with pytest.raises(ResourceError, match="is no file"):
        BatchOutput(pathlib.Path("/dev/null"), max_number=5)


def test_a_full_disk_is_an_error_in_words() -> None:
    full = pathlib.Path("/dev/full")
    if not full.exists():
        pytest.skip("this machine has no /dev/full")
    output = BatchOutput.__new__(BatchOutput)
    output._path = full
    with full.open("wb", buffering=0) as file:
        output._fd = file.fileno()
        with pytest.raises(ResourceError, match="No space left"):
            write(output, LINES[0])


def test_the_id_names_line_and_digest() -> None:
    assert answer_id(InputLine(number=12, data=None, digest=255)) == "batch_req_12_00000000000000ff"
