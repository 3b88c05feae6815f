"""create.sh and delete.sh: exact calls, queued and spot, twice, and what goes wrong."""

from __future__ import annotations

import re

import pytest
from fake_cloud import PLACE, FakeCloud

DESCRIBE = [
    [
        "tpu-vm",
        "describe",
        "my-tpu",
        *PLACE,
        "--format=value(state,acceleratorType,networkEndpoints[].ipAddress)",
    ],
    ["queued-resources", "describe", "my-tpu", *PLACE, "--format=value(state.state)"],
]


def test_create_asks_for_a_tpu_vm_and_waits(cloud: FakeCloud) -> None:
    result = cloud.run("create.sh")
    assert result.returncode == 0, result.stderr
    assert cloud.calls() == [
        *DESCRIBE,
        [
            "tpu-vm",
            "create",
            "my-tpu",
            *PLACE,
            "--accelerator-type=v6e-8",
            "--version=v2-alpha-tpuv6e",
        ],
        DESCRIBE[0],
    ]
    assert "my-tpu is READY: 1 host(s). It costs money until tpu_scripts/delete.sh" in result.stderr


def test_create_twice_is_fine(cloud: FakeCloud) -> None:
    cloud.run("create.sh")
    cloud.forget_calls()
    result = cloud.run("create.sh")
    assert result.returncode == 0
    assert "my-tpu (v6e-8) is there already and READY: nothing to do" in result.stderr
    assert not cloud.calls("tpu-vm create", "queued-resources create")


def test_create_spot_with_flags_for_gcloud(cloud: FakeCloud) -> None:
    result = cloud.run(
        "create.sh", "--spot", "--", "--network=my net", "--internal-ips", RUNTIME_VERSION="other"
    )
    assert result.returncode == 0, result.stderr
    assert cloud.calls("tpu-vm create") == [
        [
            "tpu-vm",
            "create",
            "my-tpu",
            *PLACE,
            "--accelerator-type=v6e-8",
            "--spot",
            "--version=other",
            "--network=my net",
            "--internal-ips",
        ]
    ]


def test_create_queued_spot_waits_with_progress(cloud: FakeCloud) -> None:
    result = cloud.run("create.sh", "--queued", "--spot", ACCELERATOR_TYPE="v5litepod-16")
    assert result.returncode == 0, result.stderr
    assert cloud.calls("queued-resources create", "tpu-vm create") == [
        [
            "queued-resources",
            "create",
            "my-tpu",
            *PLACE,
            "--accelerator-type=v5litepod-16",
            "--spot",
            "--runtime-version=v2-alpha-tpuv5-lite",
            "--node-id=my-tpu",
        ]
    ]
    states = [line.split()[1] for line in result.stderr.splitlines() if line.endswith("s)")]
    assert states == ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    assert "v5litepod-16 (16 chips, 4 hosts), spot" in result.stderr


def test_create_again_waits_for_what_was_asked(cloud: FakeCloud) -> None:
    first = cloud.run("create.sh", "--queued", "--no-wait")
    assert first.returncode == 0
    assert "not waiting" in first.stderr
    second = cloud.run("create.sh")
    assert second.returncode == 0, second.stderr
    assert "my-tpu was asked for already" in second.stderr
    assert "my-tpu is READY" in second.stderr
    assert len(cloud.calls("queued-resources create")) == 1
    assert not cloud.calls("tpu-vm create")


def test_create_without_waiting_returns_at_once(cloud: FakeCloud) -> None:
    assert cloud.run("create.sh", "--no-wait").returncode == 0
    assert cloud.calls("tpu-vm create")[0][-1] == "--async"
    assert cloud.cloud()["nodes"]["my-tpu"]["states"] == ["CREATING", "READY"]
    result = cloud.run("create.sh")
    assert result.returncode == 0
    assert len(cloud.calls("tpu-vm create")) == 1


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_a_request_that_will_not_be_filled_is_told(cloud: FakeCloud, state: str) -> None:
    cloud.configure(queue_states=["WAITING_FOR_RESOURCES", state])
    result = cloud.run("create.sh", "--queued")
    assert result.returncode == 1
    assert f"state: {state}" in result.stderr  # the details
    assert f"the queued resource 'my-tpu' is {state}" in result.stderr
    assert "tpu_scripts/delete.sh removes it" in result.stderr
    again = cloud.run("create.sh", "--queued")
    assert again.returncode == 1
    assert len(cloud.calls("queued-resources create")) == 1


@pytest.mark.parametrize("state", ["PREEMPTED", "STOPPED"])
def test_a_tpu_vm_that_was_taken_away(cloud: FakeCloud, state: str) -> None:
    cloud.have_node(state)
    result = cloud.run("create.sh")
    assert result.returncode == 1
    assert f"TPU VM 'my-tpu' is {state}: tpu_scripts/delete.sh, then create.sh" in result.stderr


def test_waiting_ends_after_the_timeout(cloud: FakeCloud) -> None:
    cloud.configure(queue_states=["WAITING_FOR_RESOURCES"])
    result = cloud.run("create.sh", "--queued", "--timeout", "0")
    assert result.returncode == 1
    # The clock may pass a second between the request and the look at it.
    assert re.search(r"still WAITING_FOR_RESOURCES after \d+ s. The request stays", result.stderr)
    assert "my-tpu" in cloud.cloud()["queued"]


def test_another_type_of_that_name_is_no_match(cloud: FakeCloud) -> None:
    cloud.have_node(accelerator="v5litepod-8")
    result = cloud.run("create.sh")
    assert result.returncode == 1
    assert "'my-tpu' exists and is a v5litepod-8, not a v6e-8" in result.stderr


@pytest.mark.parametrize("accelerator", ["tpu7x-8", "v7x-8"])
def test_seventh_generation_is_refused_with_the_reason(cloud: FakeCloud, accelerator: str) -> None:
    result = cloud.run("create.sh", ACCELERATOR_TYPE=accelerator)
    assert result.returncode == 2
    assert "the Cloud TPU API has no TPU7x" in result.stderr
    assert not cloud.calls()


def test_an_unknown_type_needs_a_runtime_version(cloud: FakeCloud) -> None:
    result = cloud.run("create.sh", ACCELERATOR_TYPE="v9-8")
    assert result.returncode == 2
    assert "export RUNTIME_VERSION=..." in result.stderr
    assert cloud.run("create.sh", ACCELERATOR_TYPE="v9-8", RUNTIME_VERSION="new").returncode == 0
    assert cloud.calls("tpu-vm create")[0][-1] == "--version=new"


@pytest.mark.parametrize("command", ["tpu-vm create", "tpu-vm describe"])
def test_a_failure_of_gcloud_ends_with_its_status(cloud: FakeCloud, command: str) -> None:
    cloud.fail(command, 7, "Quota 'TPUV6EPerProjectPerZone' exhausted")
    result = cloud.run("create.sh")
    assert result.returncode == 7
    assert "Quota 'TPUV6EPerProjectPerZone' exhausted" in result.stderr
    assert f"create.sh: gcloud ended with 7: gcloud compute tpus {command} my-tpu" in result.stderr


def test_delete_twice(cloud: FakeCloud) -> None:
    cloud.run("create.sh")
    cloud.forget_calls()
    result = cloud.run("delete.sh", "--yes")
    assert result.returncode == 0, result.stderr
    assert cloud.calls("tpu-vm delete") == [["tpu-vm", "delete", "my-tpu", *PLACE, "--quiet"]]
    assert cloud.cloud()["nodes"] == {}
    again = cloud.run("delete.sh", "--yes")
    assert again.returncode == 0
    assert "nothing to delete" in again.stderr
    assert len(cloud.calls("tpu-vm delete")) == 1


def test_delete_takes_the_queued_resource_with_its_tpu_vm(cloud: FakeCloud) -> None:
    cloud.run("create.sh", "--queued")
    result = cloud.run("delete.sh", "--yes")
    assert result.returncode == 0, result.stderr
    assert cloud.calls("queued-resources delete") == [
        ["queued-resources", "delete", "my-tpu", *PLACE, "--force", "--quiet"]
    ]
    assert cloud.cloud()["nodes"] == cloud.cloud()["queued"] == {}


def test_delete_does_nothing_unasked(cloud: FakeCloud) -> None:
    cloud.have_node()
    result = cloud.run("delete.sh")
    assert result.returncode == 2
    assert "delete.sh --yes deletes 'my-tpu' without asking" in result.stderr
    assert not cloud.calls("tpu-vm delete")


def test_delete_tells_when_gcloud_fails(cloud: FakeCloud) -> None:
    cloud.have_node()
    cloud.fail("tpu-vm delete", 5)
    result = cloud.run("delete.sh", "--yes")
    assert result.returncode == 5
    assert "is deleted" not in result.stderr


def test_delete_of_what_is_being_deleted(cloud: FakeCloud) -> None:
    cloud.have_node("DELETING")
    result = cloud.run("delete.sh", "--yes")
    assert result.returncode == 0
    assert "being deleted already" in result.stderr
