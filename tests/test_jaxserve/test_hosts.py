"""Leader and followers as threads of this process, jax and the devices being stand-ins."""

import dataclasses
import queue
import socket
import threading
import time

import numpy as np
import pytest
from hosts_processes import free_ports

from jaxserve.config import EngineConfig, HostsConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.hosts import detect, facts, follow, lead, leader, line, messages
from jaxserve.engine.hosts.follow import Follower
from jaxserve.engine.hosts.leader import Leader
from jaxserve.engine.hosts.line import Line, frame
from jaxserve.errors import DeviceLostError, ResourceError, UsageError
from jaxserve.request import SamplingParams
from jaxserve.sampling.sampler import SampleResult
from jaxserve.sampling.state import slot_reset

CONFIG = EngineConfig(max_num_seqs=3)
SOON = 20.0


# One connection.


class End:
    """A Line's end with what it was told."""

    def __init__(self, connection, decode=messages.decode_from_leader):
        self.messages, self.lost = queue.SimpleQueue(), queue.SimpleQueue()
        self.line = Line(
            connection,
            decode,
            lambda line, message: self.messages.put(message),
            lambda line, reason: self.lost.put(reason),
        )


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    yield near, far
    near.close()
    far.close()


def test_what_was_sent_before_the_end_still_arrives(pair):
    near, far = (End(connection) for connection in pair)
    far.line.trust()
    data = bytes(5_000_000)
    near.line.send(frame(messages.Forward(1, 1, data)))
    near.line.send(frame(messages.Shutdown("why")))
    near.line.close()
    assert far.messages.get(timeout=SOON).packed == data
    assert far.messages.get(timeout=SOON) == messages.Shutdown("why")
    assert far.lost.get(timeout=SOON) == "closed its connection"
    assert near.lost.empty()
    with pytest.raises(OSError):
        near.line.send(frame(messages.Welcome()))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent a message of 542393671 bytes"),
        (b"\x03\x00\x00\x00abc", "a message that is not ours"),
        (line._LENGTH.pack(line.STRANGER_LIMIT + 1), "sent a message of 1048577 bytes"),
    ],
)
def test_a_stranger_is_hung_up_on(pair, data, words):
    near, far = pair
    end = End(near)
    far.sendall(data)
    assert words in end.lost.get(timeout=SOON)
    with pytest.raises(OSError):
        end.line.send(frame(messages.Welcome()))


def test_silence_counts_as_death_even_while_a_message_waits_to_be_sent(pair, monkeypatch):
    monkeypatch.setattr(line, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(line, "DEAD_AFTER_SECONDS", 0.5)
    near, _ = pair  # the other end takes nothing and says nothing
    end = End(near)
    failed = queue.SimpleQueue()

    def fill():
        try:
            while True:
                end.line.send(frame(messages.Sample(1, bytes(1_000_000))))
        except OSError as error:
            failed.put(error)

    threading.Thread(target=fill, daemon=True).start()
    assert end.lost.get(timeout=SOON) == "has been silent for 0.5 seconds"
    failed.get(timeout=SOON)


def test_beats_keep_a_quiet_connection_alive(pair, monkeypatch):
    monkeypatch.setattr(line, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(line, "DEAD_AFTER_SECONDS", 1.5)
    near, far = (End(connection) for connection in pair)
    time.sleep(2.5)
    assert near.lost.empty()
    assert far.lost.empty()
    near.line.close()
    far.line.close()


# What travels, and what is compared.


def test_arrays_arrive_bit_for_bit():
    rng = np.random.default_rng(0)
    forward = rng.integers(-(2**31), 2**31, 70).astype(np.int32)
    sent = messages.to_forward(Bucket(tokens=8, rows=2), forward)
    bucket, array = messages.from_forward(messages.decode_from_leader(messages.encode(sent)))
    assert bucket == Bucket(tokens=8, rows=2)
    assert array.dtype == np.int32
    assert np.array_equal(array, forward)
    reset = slot_reset(
        2,
        SamplingParams(logit_bias={3: -1.5}, bad_words=[[7, 8]], min_tokens=2),
        prompt_ids=[4, 5],
        output_ids=[6],
        stop_ids=[2],
        vocab_size=50,
    )
    found = messages.from_reset(
        messages.decode_from_leader(messages.encode(messages.to_reset(reset)))
    )
    for array, expected in zip(found, reset, strict=True):
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert np.array_equal(array, expected)


def test_a_models_fingerprint_tells_files_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3_000_000))
        (tmp_path / name / "deep" / "config.json").write_text("{}")
    (tmp_path / "b" / ".cache").mkdir()
    (tmp_path / "b" / ".cache" / "lock").write_text("download")
    first = facts.fingerprint(tmp_path / "a")
    assert facts.fingerprint(tmp_path / "b") == first
    for change in (b"\1" + bytes(2_999_999), bytes(2_999_999) + b"\1", bytes(2_999_999)):
        (tmp_path / "b" / "model.safetensors").write_bytes(change)
        assert facts.fingerprint(tmp_path / "b") != first
    one_file = facts.fingerprint(tmp_path / "a" / "model.safetensors")
    assert one_file != facts.fingerprint(tmp_path / "b" / "model.safetensors")


# Leader and followers.


@pytest.fixture
def ended(monkeypatch):
    """Reasons of processes that were ended; jax starts and ends at once."""
    reasons = queue.SimpleQueue()
    for module in (leader, follow):
        monkeypatch.setattr(module, "start_jax", lambda hosts: None)
        monkeypatch.setattr(module, "end_jax", lambda: None)
        monkeypatch.setattr(module, "end_without_jax", lambda code: None)
        monkeypatch.setattr(module, "end_process", lambda reason, code=1: reasons.put(reason))
    monkeypatch.setattr(leader, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(leader, "EXPLAIN_SECONDS", 0.3)
    return reasons


@pytest.fixture
def hosts():
    return HostsConfig(
        num_processes=2,
        process_id=0,
        coordinator_address=f"127.0.0.1:{free_ports()}",
        join_seconds=SOON,
    )


class Group:
    """A leader that waits in a thread, and followers that join it in others."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.leader = Leader(hosts, CONFIG)
        self.joined = start(self.leader.join)

    def follower(self, number=1, config=CONFIG, **changes):
        hosts = dataclasses.replace(self.hosts, process_id=number, **changes)
        found = Follower(hosts, config)
        return found, start(found.join)


def start(call, *arguments):
    """Runs a call in a thread; the function that it returns waits for the result."""
    results = queue.SimpleQueue()

    def work():
        try:
            results.put((call(*arguments), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()

    def wait():
        result, error = results.get(timeout=SOON)
        if error is not None:
            raise error
        return result

    return wait


@pytest.fixture
def group(ended, hosts):
    """Leader and one follower, joined."""
    made = Group(hosts)
    follower, joined = made.follower()
    joined()
    made.joined()
    yield made.leader, follower
    made.leader.close("the test is over")
    follower.close()


class Recording:
    """A device that only notes what is called."""

    def __init__(self):
        self.calls = queue.SimpleQueue()
        self.fail = None

    def forward(self, bucket, packed):
        if self.fail:
            raise self.fail
        self.calls.put((bucket, packed.tolist()))

    def sample(self, rows, packed):
        self.calls.put((rows, packed.tolist()))
        return SampleResult(*[0] * len(SampleResult._fields))

    def reset_slot(self, reset):
        self.calls.put(("reset", int(reset.slot)))

    def allow_tokens(self, slots, masks):
        self.calls.put((slots.tolist(), masks.tolist()))

    def renew(self):
        self.calls.put("renew")

    def read(self, array):
        return array


FORWARD = (Bucket(tokens=8, rows=3), np.arange(4, dtype=np.int32))
SAMPLE = (3, np.arange(2, dtype=np.int32))
FORWARD_SEEN = (Bucket(tokens=8, rows=3), [0, 1, 2, 3])
SAMPLE_SEEN = (3, [0, 1])


def facts_are(monkeypatch, ours, theirs):
    monkeypatch.setattr(leader, "model_facts", lambda *arguments: {"the kernels": ours})
    monkeypatch.setattr(follow, "model_facts", lambda *arguments: {"the kernels": theirs})


def test_followers_make_the_leaders_calls_in_order(group, monkeypatch, ended):
    facts_are(monkeypatch, "x", "x")
    boss, follower = group
    theirs = start(follower.agree, None, None, {}, 70)
    assert boss.agree(None, None, {}, 90) == theirs() == 70
    near, far = Recording(), Recording()
    serving = start(lambda: follower.serve(follower.join_device(far)))
    device = boss.join_device(near)
    reset = slot_reset(2, SamplingParams(), prompt_ids=[], output_ids=[], stop_ids=[], vocab_size=9)
    device.forward(*FORWARD)
    device.sample(*SAMPLE)
    device.reset_slot(reset)
    device.allow_tokens(np.array([4, 5], np.int32), np.array([[7], [2**32 - 1]], np.uint32))
    device.renew()
    device.forward(*FORWARD)
    device.sample(*SAMPLE)
    boss.close()
    serving()
    follower.close()
    for calls in (near.calls, far.calls):
        assert [calls.get(timeout=SOON) for _ in range(7)] == [
            FORWARD_SEEN,
            SAMPLE_SEEN,
            ("reset", 2),
            ([4, 5], [[7], [2**32 - 1]]),
            "renew",
            FORWARD_SEEN,
            SAMPLE_SEEN,
        ]
    assert ended.empty()


def test_another_model_is_refused(group, monkeypatch):
    facts_are(monkeypatch, "cpu", "reference")
    boss, follower = group
    theirs = start(follower.agree, None, None, {}, 70)
    words = "process 1 .* is refused: the kernels is reference on process 1 and cpu on process 0"
    with pytest.raises(UsageError, match=words):
        boss.agree(None, None, {}, 90)
    with pytest.raises(UsageError, match=words):
        theirs()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": EngineConfig(max_num_seqs=4)}, "--max-num-seqs is 4 on process 1 and 3 on"),
        ({"num_processes": 3}, "--num-processes is 3 on process 1 and 2 on process 0"),
    ],
)
def test_another_setting_is_refused(ended, hosts, changes, words):
    made = Group(hosts)
    _, joined = made.follower(**changes)
    for wait in (joined, made.joined):
        with pytest.raises(UsageError, match=words):
            wait()
    made.leader.close("refused")
    assert ended.empty()


def test_other_settings_of_the_leader_alone_are_not_compared(ended, hosts):
    made = Group(hosts)
    config = dataclasses.replace(CONFIG, model="/another/place", max_queue_len=1)
    follower, joined = made.follower(config=config)
    joined()
    made.joined()
    made.leader.close("over")
    follower.close()


def test_a_number_that_is_taken_is_refused(ended, hosts):
    made = Group(dataclasses.replace(hosts, num_processes=3))
    first, _ = made.follower()
    deadline = time.monotonic() + SOON
    while not made.leader._lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    _, joined = made.follower()
    with pytest.raises(UsageError, match=r"--process-id 1 is taken by 127\.0\.0\.1"):
        joined()
    with pytest.raises(UsageError, match="--process-id 1 is taken"):
        made.joined()
    made.leader.close("refused")
    assert "refused" in ended.get(timeout=SOON)  # what the first follower ends with
    first.close()


def test_whoever_does_not_know_the_token_is_refused_and_the_leader_waits_on(
    ended, hosts, monkeypatch
):
    monkeypatch.setenv("JAXSERVE_HOSTS_TOKEN", "secret")
    made = Group(hosts)
    monkeypatch.setenv("JAXSERVE_HOSTS_TOKEN", "guess")
    _, joined = made.follower()
    with pytest.raises(UsageError, match="JAXSERVE_HOSTS_TOKEN is not the leader's"):
        joined()
    monkeypatch.setenv("JAXSERVE_HOSTS_TOKEN", "secret")
    follower, joined = made.follower()
    joined()
    made.joined()
    made.leader.close("over")
    follower.close()


def test_who_never_comes_is_named(ended, hosts):
    hosts = dataclasses.replace(hosts, num_processes=4, join_seconds=1.0)
    made = Group(hosts)
    follower, _ = made.follower(2)
    with pytest.raises(ResourceError, match=r"processes 1, 3 of 4 did not come to 127.* 1 seconds"):
        made.joined()
    made.leader.close("process 1 did not come")
    assert ended.get(timeout=SOON) == "process 0 ended: process 1 did not come"
    follower.close()
    alone = Follower(dataclasses.replace(hosts, process_id=1), CONFIG)
    with pytest.raises(ResourceError, match=r"the leader \(process 0\) does not answer at 127"):
        alone.join()


def test_the_context_manager_tells_followers_why_it_ends(ended, hosts):
    follower = Follower(dataclasses.replace(hosts, process_id=1), CONFIG)
    joined = start(follower.join)

    def work():
        with lead.lead(hosts, CONFIG):
            joined()
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        work()
    assert ended.get(timeout=SOON) == "process 0 ended: a bug"
    follower.close()


def test_a_lost_follower_fails_every_later_call_and_ends_who_does_not_end(group, ended):
    boss, follower = group
    device = leader.LeadingDevice(boss, Recording())
    device.forward(*FORWARD)
    follower.line._socket.shutdown(socket.SHUT_RDWR)
    reason = ended.get(timeout=SOON)
    while "process 1" not in reason:  # the follower, too, ends its process
        reason = ended.get(timeout=SOON)
    assert "process 1 (127.0.0.1) closed its connection; start the command again" in reason
    for call in (lambda: device.forward(*FORWARD), device.renew):
        with pytest.raises(DeviceLostError, match="process 1"):
            call()
    assert device._device.calls.get(timeout=1) == FORWARD_SEEN
    assert device._device.calls.empty()  # what cannot be published is not run


def test_a_followers_own_failure_is_told(group, ended):
    boss, follower = group
    broken = Recording()
    broken.fail = RuntimeError("the device is on fire")
    follow._EXPLAIN_SECONDS, before = 0.1, follow._EXPLAIN_SECONDS
    try:
        serving = start(follower.serve, broken)
        boss.publish(messages.to_forward(*FORWARD))
        with pytest.raises(DeviceLostError, match="on fire") as caught:
            serving()
    finally:
        follow._EXPLAIN_SECONDS = before
    follower.close(str(caught.value))
    deadline = time.monotonic() + SOON
    while boss.lost is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "process 1 (127.0.0.1) failed: a step failed: the device is on fire" in boss.lost


def test_the_leaders_own_failure_ends_the_engine_since_hosts_cannot_renew_alone(group):
    boss, _ = group
    broken = Recording()
    broken.fail = RuntimeError("the device is on fire")
    with pytest.raises(DeviceLostError, match=r"on fire.*start the command again on all hosts"):
        leader.LeadingDevice(boss, broken).forward(*FORWARD)


def test_an_address_of_another_machine_is_refused(ended, hosts):
    wrong = dataclasses.replace(hosts, coordinator_address="203.0.113.7:4000")
    with pytest.raises(ResourceError, match=r"cannot listen on 203\.0\.113\.7:4000"):
        Leader(wrong, CONFIG).join()
    used = socket.create_server(("127.0.0.1", hosts.address[1]))
    with used, pytest.raises(ResourceError, match="Address already in use"):
        Leader(hosts, CONFIG).join()


# --distributed auto.

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[3-6]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}


def test_auto_asks_the_cluster_for_what_is_not_given(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    auto = HostsConfig(distributed="auto", join_seconds=7, coordinator_address="10.0.0.3:99")
    found = detect.find_hosts(auto)
    assert found == HostsConfig(
        num_processes=4, process_id=2, coordinator_address="10.0.0.3:99", join_seconds=7
    )
    monkeypatch.setenv("SLURM_NTASKS", "two")
    with pytest.raises(ResourceError, match=r"could not be asked: .*two"):
        detect.find_hosts(auto)


def test_auto_without_a_cluster_says_what_to_give(monkeypatch):
    for name in (*SLURM, "KUBERNETES_SERVICE_HOST", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"belongs to no cluster .* give --num-processes"):
        detect.find_hosts(HostsConfig(distributed="auto"))
    given = HostsConfig(num_processes=1)
    assert detect.find_hosts(given) is given
