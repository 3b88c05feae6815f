"""What stands on a fake host of a TPU instead of Python and jaxserve: programs that write down how
they were called and behave as the file `behaviour` in the host's home folder says."""

from __future__ import annotations

import pathlib
import shutil
import sys

#: Programs that the scripts may use on a host; nothing else is in PATH there.
TOOLS = (
    *("bash", "cat", "cksum", "dirname", "gzip", "mkdir", "mv", "nohup", "rm", "setsid"),
    *("sleep", "sort", "tail", "tar", "tr", "wc"),
)

#: Python, its venv and pip. "old" is too old; "bare" has no venv module; installing makes jaxserve.
PYTHON = """#!{bash}
version=$(cat "$HOME/python" 2>/dev/null || echo 3.12)
case "$*" in
*version_info*) [[ $0 == */jaxserve-venv/* || $version != old ]] ;;
*ensurepip*) [[ $version != bare ]] ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "$0 $*" >>"$HOME/venv.log" ;;
"-m pip --version") ;;
"-m pip install --quiet --user --upgrade uv")
    mkdir -p "$HOME/.local/bin" && cp "$HOME/bin/uv-to-install" "$HOME/.local/bin/uv" ;;
"-m pip "*)
    printf '%s\\n' "$*" >>"$HOME/pip.log"
    if [[ -e $HOME/pip-fails ]]; then echo "no matching distribution" >&2; exit 1; fi
    cp "$HOME/bin/jaxserve-to-install" "${{0%/*}}/jaxserve" ;;
"-c import jax, jaxserve") ;;
--version) echo "Python $version.4" ;;
"- http"*) # the hosts are one machine here, but only worker 0 has a server of its own
    [[ $FAKE_WORKER == 0 ]] && exec {python} -I -S "$@" ;;
*kernels.py*) exec {python} -I -S "$@" ;;
*) echo "python stub: $*" >&2; exit 99 ;;
esac
"""

UV = """#!{bash}
echo "uv $*" >>"$HOME/venv.log"
for folder in "$@"; do :; done
mkdir -p "$folder/bin" && cp "$HOME/bin/python3" "$folder/bin/python"
"""

SUDO = """#!{bash}
echo "$*" >>"$HOME/sudo.log"
if [[ $* == *python3-venv* ]]; then echo 3.12 >"$HOME/python"; fi
"""

HOSTNAME = """#!{bash}
if [[ $1 == -I ]]; then echo "10.0.0.$FAKE_WORKER 172.17.0.1 "; else echo "host-$FAKE_WORKER"; fi
"""

JAXSERVE = '''#!{python} -IS
"""Stands in for jaxserve: serve answers /ready on worker 0, batch echoes ids."""
import json, os, pathlib, sys, time
home = pathlib.Path(os.environ["HOME"])
with (home / "jaxserve.calls").open("a") as calls:
    keep = ("JAX_PLATFORMS", "JAXSERVE_HOSTS_TOKEN")
    given = {{name: os.environ.get(name) for name in keep}}
    calls.write(json.dumps([sys.argv[1:], given, os.getpid()]) + "\\n")
path = home / "behaviour"
behaviour = path.read_text() if path.exists() else ""
print("words of the log", flush=True)
if behaviour == "die":
    print("the model does not fit", flush=True)
    sys.exit(3)
if behaviour == "follow":
    sys.exit(0)
if behaviour == "hang" or (sys.argv[1] == "serve" and os.environ["FAKE_WORKER"] != "0"):
    time.sleep(60)
    sys.exit(9)
if sys.argv[1] == "serve":
    import socket
    listener = socket.create_server(
        ("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), backlog=8)
    listener.settimeout(60)  # nothing outlives the tests for long
    while True:
        client, _ = listener.accept()
        found = client.recv(4096).startswith(b"GET /ready ")
        client.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" if found else b"HTTP/1.0 404 No\\r\\n\\r\\n")
        client.close()
source, target = (pathlib.Path(word) for word in sys.argv[2:4])
done = target.read_text().splitlines() if target.exists() else []
ids = {{json.loads(line)["custom_id"] for line in done}}
with target.open("a") as answers:
    for number, line in enumerate(source.read_text().splitlines()):
        name = json.loads(line)["custom_id"]
        if behaviour.startswith("stop after") and number == int(behaviour.split()[-1]):
            answers.flush()
            time.sleep(60)
            sys.exit(9)
        if behaviour.startswith("fail after") and number == int(behaviour.split()[-1]):
            print("out of memory", flush=True)
            sys.exit(1)
        if name not in ids:
            answers.write(json.dumps({{"custom_id": name, "by": os.getpid()}}) + "\\n")
'''


def install(home: pathlib.Path) -> None:
    """Makes `home` the home folder of a host: `bin` is all of its PATH."""
    folder = home / "bin"
    folder.mkdir(parents=True)
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"the tests need {tool}"
        (folder / tool).symlink_to(found)
    words = {"bash": shutil.which("bash"), "python": sys.executable}
    stubs = {
        "python3": PYTHON,
        "python3.12": PYTHON,
        "uv-to-install": UV,
        "jaxserve-to-install": JAXSERVE,
        "sudo": SUDO,
        "hostname": HOSTNAME,
    }
    for name, text in stubs.items():
        path = folder / name
        path.write_text(text.format(**words))
        path.chmod(0o755)
    (folder / "cp").symlink_to(shutil.which("cp") or "")
