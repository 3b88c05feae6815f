import pytest

from jaxserve.config import EngineConfig, HostsConfig
from jaxserve.errors import UsageError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("small", "small"),
        ("org/Model-1.5B", "org/Model-1.5B"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("./folder/llama", "llama"),
        ("/folder/Qwen2.5-1.5B/", "Qwen2.5-1.5B"),
    ],
)
def test_a_path_shows_only_its_last_part(model, name):
    assert EngineConfig(model=model).model_name == name
    assert EngineConfig(model=model, served_name="mine").model_name == "mine"


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"page_size": 24}, "--page-size is 24"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"num_pages": 1}, "--num-pages is 1"),
    ],
)
def test_an_impossible_setting_is_refused_by_its_flag(settings, flag):
    with pytest.raises(UsageError, match=flag):
        EngineConfig(**settings).validate()


ALL_THREE = {"num_processes": 2, "process_id": 1, "coordinator_address": "10.0.0.7:8476"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"distributed": "yes"}, "--distributed is 'yes'"),
        ({"num_processes": 2}, "--process-id and --coordinator-address must be given"),
        ({"process_id": 0}, "--num-processes and --coordinator-address must be given"),
        (ALL_THREE | {"num_processes": 0}, "--num-processes is 0"),
        (ALL_THREE | {"process_id": 2}, "--process-id is 2; .* must be 0 to 1"),
        (ALL_THREE | {"coordinator_address": "10.0.0.7"}, "--coordinator-address is '10.0.0.7'"),
        (ALL_THREE | {"coordinator_address": "h:65535"}, "--coordinator-address is 'h:65535'"),
        (ALL_THREE | {"join_seconds": float("nan")}, "--join-seconds is nan"),
    ],
)
def test_impossible_hosts_are_refused_by_their_flag(settings, words):
    with pytest.raises(UsageError, match=words):
        HostsConfig(**settings).validate()


@pytest.mark.parametrize(
    ("settings", "several", "leads"),
    [
        ({}, False, True),
        ({"num_processes": 1}, False, True),
        ({"distributed": "auto"}, False, True),  # the cluster was not asked yet
        (ALL_THREE, True, False),
        (ALL_THREE | {"process_id": 0}, True, True),
    ],
)
def test_who_leads(settings, several, leads):
    hosts = HostsConfig(**settings)
    hosts.validate()
    assert (hosts.several, hosts.leads) == (several, leads)


def test_hosts_come_from_the_environment():
    environment = {
        "JAXSERVE_NUM_PROCESSES": "2",
        "JAXSERVE_PROCESS_ID": "1",
        "JAXSERVE_COORDINATOR_ADDRESS": "[fe80::1]:8476",
        "JAXSERVE_JOIN_SECONDS": "",
    }
    hosts = HostsConfig.from_environment(environment)
    assert hosts == HostsConfig(num_processes=2, process_id=1, coordinator_address="[fe80::1]:8476")
    assert hosts.address == ("fe80::1", 8476)
    with pytest.raises(UsageError, match="JAXSERVE_PROCESS_ID is 'one'"):
        HostsConfig.from_environment({"JAXSERVE_PROCESS_ID": "one"})
