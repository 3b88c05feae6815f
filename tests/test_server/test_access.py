"""API keys: who is let in, in both shapes of refusal, and what a changing key file does."""

from __future__ import annotations

import json
import logging
import pathlib
import stat

import flask
import pytest
from app_alone import make_app, post

from jaxserve.cli.main import main
from jaxserve.errors import UsageError
from server.access import keyring
from server.access.keyring import KeyRing

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "keys.json"


def add(path: pathlib.Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """A new key, made by the command."""
    assert main(["keys", "add", str(path), *arguments]) == 0
    return capsys.readouterr().out.strip()


def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "LOOK_SECONDS", 0.0)


def test_every_route_but_health_and_ready_is_closed_without_a_key(
    path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = add(path, capsys, "alice")
    app = make_app(api_keys=str(path))
    web = app.test_client()
    open_routes = set()
    for rule in app.url_map.iter_rules():
        for method in rule.methods or ():
            url = rule.rule.replace("<path:model>", "x").replace("<", "").replace(">", "")
            answer = web.open(url, method=method)
            if answer.status_code != 401:
                open_routes.add(rule.rule)
            elif method != "HEAD":
                kind = (
                    "authentication_error" if "messages" in rule.rule else "invalid_request_error"
                )
                assert answer.json["error"]["type"] == kind
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert answer.headers["X-Request-Id"]
    assert open_routes == {"/health", "/ready"}
    assert web.get("/no/such/path").status_code == 401
    for path_trick in ("/health/", "/health%2f..%2fmetrics", "//metrics", "/ready/../metrics"):
        assert web.get(path_trick).status_code == 401
    for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        assert web.get("/metrics", headers=headers).status_code == 200
        assert post(web, "/v1/chat/completions", CHAT, **headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic {key}"},
        {"Authorization": "Bearer {key}x"},
        {"Authorization": "Bearer "},
        {"x-api-key": "{hash}"},
        {"x-api-key": "\udcff"},
        {"x-api-key": "a" * 5000},
        {"x-api-key": "{key}", "Authorization": "Bearer other"},
    ],
)
def test_what_is_no_key_opens_nothing(
    headers: dict[str, str], path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = add(path, capsys, "alice")
    digest = json.loads(path.read_text())["tenants"]["alice"]["keys"][0]["sha256"]
    given = {
        name: text.replace("{key}", key).replace("{hash}", digest).encode("utf-8", "replace")
        for name, text in headers.items()
    }
    web = make_app(api_keys=str(path)).test_client()
    answer = web.get("/v1/models", headers={n: v.decode("latin-1") for n, v in given.items()})
    assert answer.status_code == 401
    assert answer.json["error"]["code"] in ("invalid_api_key", "missing_api_key")
    assert key not in answer.text


def test_other_sites_cannot_use_the_key_that_a_browser_keeps(
    path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = add(path, capsys, "alice")
    web = make_app(api_keys=str(path)).test_client()
    assert web.get("/v1/models", auth=(key, "")).status_code == 401
    for site, status in (("same-origin", 200), ("cross-site", 401), ("same-site", 401)):
        found = web.get("/v1/models", headers={"Sec-Fetch-Site": site}, auth=("", key))
        assert found.status_code == status


def test_keys_added_and_revoked_count_without_a_restart_and_a_broken_file_changes_nothing(
    path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_always(monkeypatch)
    first = add(path, capsys, "alice")
    web = make_app(api_keys=str(path)).test_client()

    def status(key: str) -> int:
        return int(web.get("/v1/models", headers={"x-api-key": key}).status_code)

    second = add(path, capsys, "alice")
    assert (status(first), status(second)) == (200, 200)
    good = path.read_text()
    first_id = json.loads(good)["tenants"]["alice"]["keys"][0]["id"]
    for broken in ('{"tenants": ', "", good.replace("sha256", "sha1"), '{"tenants": {"a b": {}}}'):
        path.write_text(broken)
        with caplog.at_level(logging.ERROR):
            assert (status(first), status(second), status("x")) == (200, 200, 401)
    assert len(caplog.records) == 4, "each broken file is spoken of once"
    path.unlink()
    assert status(first) == 200
    path.write_text(good)
    assert main(["keys", "revoke", str(path), first_id]) == 0
    assert (status(first), status(second)) == (401, 200)
    assert main(["keys", "revoke", str(path), "alice"]) == 0
    assert status(second) == 401


def test_a_worker_that_starts_beside_a_broken_file_has_the_last_good_keys(
    path: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = add(path, capsys, "alice")
    shared = tmp_path / "private"
    shared.mkdir()
    KeyRing(path, shared)
    path.write_text("no")
    assert KeyRing(path, shared).find(key) == "alice"
    with pytest.raises(UsageError, match="broken"):
        KeyRing(path)


def test_the_commands_set_limits_and_never_show_a_hash(
    path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = add(
        path, capsys, "alice", "--requests-per-minute", "60", "--daily-cost", "2.5", "--admin"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    add(path, capsys, "alice", "--daily-cost", "0", "--weight", "3")
    assert main(["keys", "list", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "alice (requests per minute: 60, weight: 3, admin)" in shown
    assert json.loads(path.read_text())["tenants"]["alice"]["keys"][0]["sha256"] not in shown
    for wrong in (["a b"], ["bob", "--tokens-per-minute", "-1"], ["bob", "--weight", "0"]):
        assert main(["keys", "add", str(path), *wrong]) == 2
    assert main(["keys", "revoke", str(path), "nobody"]) == 2
    assert main(["keys", "list", str(path) + "x"]) == 2


def test_a_batch_works_for_its_tenant_and_no_header_can_say_so(
    path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(path, capsys, "alice")
    web = make_app(api_keys=str(path)).test_client()
    for name in ("jaxserve.tenant", "HTTP_JAXSERVE.TENANT", "Jaxserve.Tenant"):
        assert web.get("/v1/models", headers={name: "alice"}).status_code == 401
    inside = {"jaxserve.tenant": "alice"}
    assert web.get("/v1/models", environ_overrides=inside).status_code == 200
    gone = {"jaxserve.tenant": "removed"}
    assert web.get("/v1/models", environ_overrides=gone).status_code == 401
    with web:
        web.get("/v1/models", environ_overrides=inside)
        assert flask.g.tenant == "alice"
