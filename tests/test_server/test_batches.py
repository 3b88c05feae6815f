"""Files and batches: what is kept, how lines are answered, and what a restart or a full disk leaves."""

from __future__ import annotations

import io
import json
import pathlib
import sqlite3
import time
from typing import Any

import gevent
import pytest
from app_alone import make_app, post
from fake_client import FakeClient
from openai.types import Batch, FileObject
from openai.types.batch_create_params import BatchCreateParams

from jaxserve.errors import EngineGoneError
from server.batches import files, worker
from server.batches.batch_routes import BatchBody
from server.batches.files import FileStore
from server.batches.worker import EXTENSION
from server.tenant import TENANT_KEY

CHAT = "/v1/chat/completions"


def line(number: int, text: str = "", *, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    say = text or f"@say:answer {number}@"
    body = {"messages": [{"role": "user", "content": say}], "max_tokens": 30, **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def as_file(lines: list[Any]) -> bytes:
    return b"".join(
        (entry if isinstance(entry, bytes) else json.dumps(entry).encode()) + b"\n"
        for entry in lines
    )


def upload(web: Any, data: bytes, *, name: str = "in.jsonl", tenant: str = "", **form: str) -> Any:
    fields = {"purpose": "batch", "file": (io.BytesIO(data), name), **form}
    return web.post(
        "/v1/files",
        data=fields,
        content_type="multipart/form-data",
        environ_overrides={TENANT_KEY: tenant},
    )


def begin(web: Any, lines: list[Any], **fields: Any) -> str:
    file_id = upload(web, as_file(lines)).get_json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = post(web, "/v1/batches", body)
    assert answer.status_code == 200, answer.text
    return str(answer.get_json()["id"])


def work(app: Any) -> None:
    """One round of the worker, as a server does all the time."""
    found = app.extensions[EXTENSION]
    assert found._may_work()
    found._work()


def read(web: Any, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = web.get(f"/v1/files/{file_id}/content").text
    entries = [json.loads(entry) for entry in text.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries), "answered twice"
    return {entry["custom_id"]: entry for entry in entries}


@pytest.fixture
def app(tmp_path: pathlib.Path) -> Any:
    return make_app(folder=tmp_path, max_body_bytes=50_000, max_file_bytes=100_000)


def test_a_batch_from_file_to_file(app: Any) -> None:
    web = app.test_client()
    lines = [line(1), line(2), line(3, temperature=-1), line(4, stream=True), b"", line(5)]
    batch_id = begin(web, lines, metadata={"a": "b"})
    assert web.get(f"/v1/batches/{batch_id}").get_json()["status"] == "validating"
    work(app)
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert Batch.model_validate(batch).status == "completed"
    assert batch["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    assert batch["metadata"] == {"a": "b"}
    answers = read(web, batch["output_file_id"])
    texts = {
        name: entry["response"]["body"]["choices"][0]["message"]["content"]
        for name, entry in answers.items()
    }
    assert texts == {f"line-{number}": f"answer {number}" for number in (1, 2, 5)}
    assert all(entry["response"]["request_id"] for entry in answers.values())
    failed = read(web, batch["error_file_id"])
    params = {name: entry["response"]["body"]["error"]["param"] for name, entry in failed.items()}
    assert params == {"line-3": "temperature", "line-4": "stream"}
    assert {entry["response"]["status_code"] for entry in failed.values()} == {400}
    made = web.get(f"/v1/files/{batch['output_file_id']}").get_json()
    assert FileObject.model_validate(made).purpose == "batch_output"
    with sqlite3.connect(app.extensions[EXTENSION]._services.storage._database) as connection:
        assert connection.execute("SELECT count(*) FROM batch_lines").fetchone() == (0,)


def test_requests_of_batches_come_after_those_of_people(tmp_path: pathlib.Path) -> None:
    client = FakeClient()
    app = make_app(client, folder=tmp_path)
    begin(app.test_client(), [line(1), line(2, priority=-5)])
    work(app)
    assert sorted(request.priority for request in client.requests) == [999_995, 1_000_000]


@pytest.mark.parametrize(
    ("lines", "code", "at"),
    [
        ([line(1), b"{"], "invalid_json", 2),
        ([line(1), line(1)], "duplicate_custom_id", 2),
        ([line(1, url="/v1/completions")], "invalid_request", 1),
        ([{**line(1), "method": "GET"}], "invalid_request", 1),
        ([{"custom_id": "x"}], "missing_parameter", 1),
        ([line(1, "x" * 120_000)], "too_long", 1),
        ([], "empty_file", None),
    ],
)
def test_a_bad_file_fails_whole(tmp_path: pathlib.Path, lines: Any, code: str, at: Any) -> None:
    app = make_app(folder=tmp_path, max_body_bytes=50_000)
    web = app.test_client()
    batch_id = begin(web, lines)
    work(app)
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert batch["status"] == "failed"
    error = batch["errors"]["data"][0]
    assert (error["code"], error["line"]) == (code, at)


def test_a_restart_answers_the_rest_and_nothing_twice(tmp_path: pathlib.Path) -> None:
    """The first server dies with some lines answered, one of them torn out of the middle."""
    first = make_app(folder=tmp_path)
    batch_id = begin(first.test_client(), [line(number) for number in range(1, 200)])
    found = first.extensions[EXTENSION]
    add, rounds = found._batches.add, []

    def die(batch: str, answers: Any) -> str:
        if rounds:
            raise SystemExit
        rounds.append(len(answers))
        return add(batch, answers[1:])

    found._batches.add = die
    found._may_work()
    with pytest.raises(SystemExit):
        found._work()
    found._lock.close()
    client = FakeClient()
    second = make_app(client, folder=tmp_path)
    work(second)
    web = second.test_client()
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 199)
    assert len(read(web, batch["output_file_id"])) == 199
    assert len(client.requests) == 199 - (rounds[0] - 1)


def test_one_worker_of_several_does_it(app: Any, tmp_path: pathlib.Path) -> None:
    begin(app.test_client(), [line(1)])
    other = make_app(folder=tmp_path)
    assert app.extensions[EXTENSION]._may_work()
    assert not other.extensions[EXTENSION]._may_work()
    app.extensions[EXTENSION]._lock.close()
    assert other.extensions[EXTENSION]._may_work()


def test_cancel(app: Any) -> None:
    web = app.test_client()
    batch_id = begin(web, [line(1)])
    assert post(web, f"/v1/batches/{batch_id}/cancel", {}).get_json()["status"] == "cancelling"
    work(app)
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    assert post(web, f"/v1/batches/{batch_id}/cancel", {}).status_code == 400


def test_expiry(app: Any, monkeypatch: Any) -> None:
    web = app.test_client()
    batch_id = begin(web, [line(1), line(2)])
    later = time.time() + 90_000
    monkeypatch.setattr(worker.time, "time", lambda: later)
    work(app)
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert batch["status"] == "expired"
    monkeypatch.undo()
    errors = read(web, batch["error_file_id"])
    assert {entry["error"]["code"] for entry in errors.values()} == {"batch_expired"}
    assert len(errors) == 2


def test_a_full_disk_stops_the_work_and_loses_nothing(app: Any, monkeypatch: Any) -> None:
    web = app.test_client()
    batch_id = begin(web, [line(number) for number in range(1, 20)])
    database = app.extensions[EXTENSION]._services.storage._database
    words = "SELECT RAISE(ABORT, 'database or disk is full')"
    with sqlite3.connect(database) as connection:
        connection.execute(f"CREATE TRIGGER full BEFORE INSERT ON batch_lines BEGIN {words}; END")
    monkeypatch.setattr(worker, "_TROUBLE_SECONDS", 0.05)
    done = gevent.spawn(work, app)
    gevent.sleep(0.3)
    assert not done.dead
    with sqlite3.connect(database) as connection:
        connection.execute("DROP TRIGGER full")
    done.get(timeout=10)
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 19)


def test_files(app: Any) -> None:
    web = app.test_client()
    ids = [upload(web, b"data %d\n" % n, name=f"../{n}.jsonl").get_json()["id"] for n in range(3)]
    found = web.get("/v1/files?order=asc&limit=2").get_json()
    assert found["has_more"] is True
    assert {entry["filename"] for entry in web.get("/v1/files").get_json()["data"]} == {
        "0.jsonl",
        "1.jsonl",
        "2.jsonl",
    }
    rest = web.get(f"/v1/files?order=asc&after={found['last_id']}").get_json()["data"]
    assert len(rest) == 1
    content = web.get(f"/v1/files/{ids[1]}/content")
    assert content.data == b"data 1\n"
    assert web.get("/v1/files?purpose=batch_output").get_json()["data"] == []
    assert web.delete(f"/v1/files/{ids[1]}").get_json()["deleted"] is True
    for answer in (
        web.get(f"/v1/files/{ids[1]}"),
        web.get(f"/v1/files/{ids[1]}/content"),
        web.delete(f"/v1/files/{ids[1]}"),
        web.get("/v1/files/..%2fjaxserve.sqlite/content"),
    ):
        assert answer.status_code == 404


def test_a_file_in_use_stays(app: Any) -> None:
    web = app.test_client()
    file_id = web.get(f"/v1/batches/{begin(web, [line(1)])}").get_json()["input_file_id"]
    assert web.delete(f"/v1/files/{file_id}").get_json()["error"]["code"] == "file_in_use"
    work(app)
    assert web.delete(f"/v1/files/{file_id}").status_code == 200


def test_tenants_do_not_see_each_other(app: Any) -> None:
    web = app.test_client()
    mine = upload(web, as_file([line(1)]), tenant="me").get_json()["id"]
    me, you = ({TENANT_KEY: name} for name in ("me", "you"))
    assert web.get(f"/v1/files/{mine}", environ_overrides=me).status_code == 200
    assert web.get(f"/v1/files/{mine}", environ_overrides=you).status_code == 404
    assert web.get("/v1/files", environ_overrides=you).get_json()["data"] == []
    body = {"input_file_id": mine, "endpoint": CHAT, "completion_window": "24h"}
    assert web.post("/v1/batches", json=body, environ_overrides=you).status_code == 404
    batch = web.post("/v1/batches", json=body, environ_overrides=me).get_json()["id"]
    assert web.get(f"/v1/batches/{batch}", environ_overrides=you).status_code == 404
    assert web.get("/v1/batches", environ_overrides=you).get_json()["data"] == []
    assert len(web.get("/v1/batches", environ_overrides=me).get_json()["data"]) == 1


@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"purpose": "fine-tune"}, 400, "purpose"),
        ({"purpose": ""}, 400, "purpose"),
        ({"extra": "1"}, 400, "extra"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}, 400, "expires"),
        ({"file": "text"}, 400, "file"),
    ],
)
def test_bad_uploads(app: Any, form: dict[str, str], status: int, words: str) -> None:
    answer = upload(app.test_client(), b"x", **form)
    assert (answer.status_code, words in answer.get_json()["error"]["message"]) == (status, True)
    assert not list(app.extensions[EXTENSION]._services.storage.files.glob("*"))


def test_too_much_is_refused(tmp_path: pathlib.Path) -> None:
    web = make_app(folder=tmp_path, max_file_bytes=100, max_data_bytes=150).test_client()
    assert upload(web, b"x" * 101).status_code == 413
    assert upload(web, b"x" * 200_000).status_code == 413
    assert upload(web, b"x" * 100).status_code == 200
    answer = upload(web, b"x" * 100)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (507, "storage_full")
    assert len(list((tmp_path / "files").iterdir())) == 1
    kind = "multipart/form-data; boundary=x"
    for data, content_type, status in ((b"{}", "application/json", 415), (b"junk", kind, 400)):
        assert web.post("/v1/files", data=data, content_type=content_type).status_code == status


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "expires_after"),
        ({"webhook": "x"}, 400, "webhook"),
    ],
)
def test_bad_batches(app: Any, fields: dict[str, Any], status: int, param: str) -> None:
    web = app.test_client()
    file_id = upload(web, as_file([line(1)])).get_json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = post(web, "/v1/batches", body)
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (status, param)


def test_every_parameter_of_the_official_client_is_known() -> None:
    known = set(BatchBody.__struct_fields__)
    assert set(BatchCreateParams.__annotations__) - known == set()


def test_a_disk_that_is_full_while_a_file_arrives(app: Any, monkeypatch: Any) -> None:
    web = app.test_client()
    kept = upload(web, b"kept").get_json()["id"]

    def full(self: Any, file_id: str) -> Any:
        return open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr(FileStore, "begin", full)
    answer = upload(web, b"x" * 1000)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (507, "storage_full")
    monkeypatch.undo()
    assert web.get(f"/v1/files/{kept}/content").data == b"kept"
    assert len(web.get("/v1/files").get_json()["data"]) == 1


def test_what_is_old_goes(app: Any, monkeypatch: Any) -> None:
    web = app.test_client()
    old = upload(web, b"old").get_json()["id"]
    batch = begin(web, [line(1)])
    busy = web.get(f"/v1/batches/{batch}").get_json()["input_file_id"]
    found = app.extensions[EXTENSION]
    leftover = found._services.storage.files / "file-torn.part"
    leftover.write_bytes(b"torn")
    later = time.time() + 40 * 86400
    monkeypatch.setattr(files.time, "time", lambda: later)
    found._files.sweep()
    monkeypatch.undo()
    assert not leftover.exists()
    assert web.get(f"/v1/files/{old}").status_code == 404
    assert not (found._services.storage.files / old).exists()
    assert (found._services.storage.files / busy).exists()


def test_a_line_that_breaks_the_worker_fails_alone(app: Any, monkeypatch: Any) -> None:
    web = app.test_client()
    batch_id = begin(web, [line(number) for number in range(1, 4)])
    answer = worker.answer_line

    def broken(app: Any, given: Any, tenant: str) -> Any:
        if given.number == 2:
            raise ValueError("a bug")
        return answer(app, given, tenant)

    monkeypatch.setattr(worker, "answer_line", broken)
    work(app)
    batch = web.get(f"/v1/batches/{batch_id}").get_json()
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1)
    assert read(web, batch["output_file_id"]).keys() == {"line-1", "line-3"}
    assert read(web, batch["error_file_id"])["line-2"]["error"]["code"] == "server_error"


def test_nobody_else_on_the_machine_may_read_what_is_kept(app: Any, tmp_path: pathlib.Path) -> None:
    upload(app.test_client(), b"private")
    found = [path for path in tmp_path.iterdir() if path.name.startswith(("jaxserve", "files"))]
    assert len(found) >= 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in found)


def test_a_line_waits_for_an_engine_that_is_away(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    client, away = FakeClient(), [3]
    submit = client.submit

    def sometimes(*arguments: Any) -> Any:
        if away[0]:
            away[0] -= 1
            raise EngineGoneError("the engine died")
        return submit(*arguments)

    monkeypatch.setattr(client, "submit", sometimes)
    app = make_app(client, folder=tmp_path)
    web = app.test_client()
    batch_id = begin(web, [line(1), line(2)])
    work(app)
    counts = web.get(f"/v1/batches/{batch_id}").get_json()["request_counts"]
    assert counts == {"total": 2, "completed": 2, "failed": 0}
    assert away == [0]


def test_numbers_of_thousands_of_digits_are_refused(app: Any) -> None:
    """Python reads no number of more than 4,300 digits, and says so by an exception."""
    web = app.test_client()
    for digits in ("0" * 8 + "1" + "9" * 5000, "9" * 12, "000000001999"):
        for path in ("/v1/files", "/v1/batches"):
            answer = web.get(f"{path}?limit={digits}")
            assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "limit")
        form = {"expires_after[anchor]": "created_at", "expires_after[seconds]": digits}
        answer = upload(web, b"{}", **form)
        assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "expires_after")
