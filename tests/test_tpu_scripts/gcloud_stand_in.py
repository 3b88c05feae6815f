"""Stands in for gcloud in the tests of tpu_scripts: records each call, keeps a small cloud on disk.

Run as `gcloud` through a wrapper that fake_cloud.py puts first in PATH. FAKE_GCLOUD names a folder:
`calls` gets a line for every call; `cloud` (marshal) holds what exists (nodes, queued) and what is to go wrong
(failures); `hosts/N/` is the home folder of worker N, in which `ssh --command` really runs when
"execute" is set. Flags are those of the reference pages of `gcloud compute tpus tpu-vm` and
`queued-resources`; any other is refused as gcloud does. It runs some hundred times in the tests, so it imports little:
json alone would double the time it takes.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

HOME = os.environ["FAKE_GCLOUD"]
PLACE = {"zone", "project"}
CREATE = PLACE | {"accelerator-type", "network", "subnetwork", "labels", "metadata"}
SSH = PLACE | {"worker", "ssh-flag", "ssh-key-file"}
#: Flags with a value, and flags without, of each command.
COMMANDS: dict[str, tuple[set[str], set[str]]] = {
    "tpu-vm create": (CREATE | {"version"}, {"spot", "async", "internal-ips"}),
    "tpu-vm describe": (PLACE | {"format"}, set()),
    "tpu-vm delete": (PLACE, {"quiet", "async"}),
    "tpu-vm ssh": (SSH | {"command"}, {"internal-ip"}),
    "tpu-vm scp": (SSH, {"internal-ip", "recurse"}),
    "queued-resources create": (CREATE | {"runtime-version", "node-id"}, {"spot", "async"}),
    "queued-resources describe": (PLACE | {"format"}, set()),
    "queued-resources delete": (PLACE, {"quiet", "force", "async"}),
}
NODE_FORMAT = "value(state,acceleratorType,networkEndpoints[].ipAddress)"
QUEUE_FORMAT = "value(state.state)"


def stop(status: int, message: str) -> NoReturn:
    """Ends as gcloud does when it fails."""
    print(f"ERROR: (gcloud) {message}", file=sys.stderr)
    sys.exit(status)


class Cloud:
    """What `cloud` says; saved after each change."""

    def __init__(self) -> None:
        self.path = f"{HOME}/cloud"
        with open(self.path, "rb") as file:
            self.data: dict[str, Any] = marshal.load(file)
        self.nodes: dict[str, dict[str, Any]] = self.data["nodes"]
        self.queued: dict[str, dict[str, Any]] = self.data["queued"]

    def save(self) -> None:
        """Writes it back."""
        with open(self.path, "wb") as file:
            marshal.dump(self.data, file)

    def make_node(self, name: str, accelerator: str, states: list[str]) -> None:
        """A node that is in these states, one after the other, at each look; the last stays."""
        self.nodes[name] = {"type": accelerator, "states": states}

    def fail(self, command: str, words: list[str]) -> None:
        """Fails if a failure is planned for this call."""
        for failure in self.data["failures"]:
            if command == failure["command"] and failure.get("match", "") in " ".join(words):
                if not os.path.exists(failure.get("when_exists", HOME)):
                    continue
                if failure.get("after"):  # so many more go well
                    failure["after"] -= 1
                    self.save()
                    continue
                if (times := failure.get("times")) is not None:
                    if times == 0:
                        continue
                    failure["times"] = times - 1
                    self.save()
                if failure.get("before_node_state"):
                    for node in self.nodes.values():
                        node["states"] = [failure["before_node_state"]]
                    self.save()
                stop(failure["status"], failure["stderr"])


def parse(words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Command, positional words, and flags ("" for those without a value)."""
    if words[:2] != ["compute", "tpus"] or " ".join(words[2:4]) not in COMMANDS:
        stop(2, f"Invalid choice: {words}")
    command = " ".join(words[2:4])
    valued, plain = COMMANDS[command]
    positional: list[str] = []
    flags: dict[str, str] = {}
    for word in words[4:]:
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--"):
            positional.append(word)
        elif (name in valued and equals) or (name in plain and not equals):
            flags[name] = value
        else:
            stop(2, f"unrecognized arguments: {word}")
    if not flags.get("zone") or not flags.get("project"):
        stop(2, "zone or project missing")
    return command, positional, flags


def create(cloud: Cloud, command: str, name: str, flags: dict[str, str]) -> None:
    """tpu-vm create and queued-resources create."""
    accelerator = flags["accelerator-type"]
    if command.startswith("tpu-vm"):
        if name in cloud.nodes:
            stop(1, f"ALREADY_EXISTS: {name}")
        assert flags["version"]
        cloud.make_node(name, accelerator, ["CREATING", "READY"] if "async" in flags else ["READY"])
    else:
        if name in cloud.queued:
            stop(1, f"ALREADY_EXISTS: {name}")
        assert flags["runtime-version"]
        states = list(cloud.data["queue_states"])
        cloud.queued[name] = {"states": states, "node": flags["node-id"], "type": accelerator}


def describe(cloud: Cloud, command: str, name: str, flags: dict[str, str]) -> None:
    """tpu-vm describe and queued-resources describe; each look takes things one state further."""
    kind = cloud.nodes if command.startswith("tpu-vm") else cloud.queued
    if name not in kind:
        stop(1, f"NOT_FOUND: Resource '{name}' was not found")
    thing = kind[name]
    if "format" not in flags:
        print(
            f"name: {name}\nstate:\n  state: {thing['states'][0]}\n  detail: {thing.get('detail')}"
        )
        return
    state = thing["states"][0]
    if len(thing["states"]) > 1:
        del thing["states"][0]
    if kind is cloud.nodes:
        assert flags["format"] == NODE_FORMAT, flags
        addresses = ";".join(f"10.0.0.{worker}" for worker in range(cloud.data["hosts"]))
        print(state, thing["type"], addresses, sep="\t")
    else:
        assert flags["format"] == QUEUE_FORMAT, flags
        print(state)
        if state == "ACTIVE" and thing["node"] not in cloud.nodes:
            cloud.make_node(thing["node"], thing["type"], ["READY"])


def delete(cloud: Cloud, command: str, name: str, flags: dict[str, str]) -> None:
    """tpu-vm delete and queued-resources delete."""
    if "quiet" not in flags:
        stop(1, "would ask")
    if command.startswith("tpu-vm"):
        del cloud.nodes[name]
        return
    thing = cloud.queued[name]
    if thing["node"] in cloud.nodes:
        if "force" not in flags:
            stop(9, "DeleteQueuedResource is not supported when state is ACTIVE")
        del cloud.nodes[thing["node"]]
    del cloud.queued[name]


def workers(cloud: Cloud, name: str, flags: dict[str, str]) -> list[int]:
    """The workers that --worker means, of a node that is READY."""
    if name not in cloud.nodes or cloud.nodes[name]["states"][0] != "READY":
        stop(1, f"{name} is not ready")
    every = list(range(cloud.data["hosts"]))
    return every if flags.get("worker") == "all" else [every[int(flags.get("worker", 0))]]


def ssh(cloud: Cloud, name: str, flags: dict[str, str]) -> None:
    """Runs --command on the workers at once; the first failure's status is gcloud's."""
    import subprocess

    chosen = workers(cloud, name, flags)
    if not cloud.data["execute"]:
        return
    # gcloud splits the command at blanks and ssh joins it again; the login shell reads the rest.
    command = " ".join(flags["command"].split(" "))
    running = []
    for worker in chosen:
        home = f"{HOME}/hosts/{worker}"
        environment = {"HOME": home, "PATH": f"{home}/bin", "FAKE_WORKER": str(worker)}
        running.append(
            subprocess.Popen(
                ["bash", "-c", command], cwd=home, env=environment, stdin=subprocess.DEVNULL
            )
        )
    statuses = [process.wait() for process in running]
    if len(chosen) > 1:
        for worker, status in zip(chosen, statuses, strict=True):
            if status:
                print(f"##### Command execution on worker {worker} failed", file=sys.stderr)
    sys.exit(next((status for status in statuses if status), 0))


def scp(cloud: Cloud, positional: list[str], flags: dict[str, str]) -> None:
    """Copies one file to the workers, or one from a worker; a colon means remote, as in gcloud."""
    import shutil

    source, target = positional
    name = (source if ":" in source else target).partition(":")[0]
    for worker in workers(cloud, name, flags):
        home = f"{HOME}/hosts/{worker}"
        try:
            if ":" in target:
                shutil.copyfile(source, f"{home}/{target.partition(':')[2]}")
            else:
                shutil.copyfile(f"{home}/{source.partition(':')[2]}", target)
        except OSError as error:
            stop(1, f"scp: {error}")


def main(words: list[str]) -> None:
    """One call."""
    with open(f"{HOME}/calls", "a") as calls:
        calls.write(f"{words!r}\n")
    command, positional, flags = parse(words)
    cloud = Cloud()
    cloud.fail(command, words)
    verb = command.split()[1]
    if verb == "ssh":
        ssh(cloud, positional[0], flags)
    elif verb == "scp":
        scp(cloud, positional, flags)
    else:
        {"create": create, "describe": describe, "delete": delete}[verb](
            cloud, command, positional[0], flags
        )
        cloud.save()


main(sys.argv[1:])
