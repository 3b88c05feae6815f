#!/usr/bin/env bash
# on_host.sh VERB ...: runs on the hosts of a TPU, where sync.sh has brought it; the other scripts call it there.
#
#   setup                       virtual environment and installation, if dependencies changed
#   start server|batch|bench    one job, which survives the ssh connection: folder, log, pid, exit status
#   stop NAME                   asks a job to end, then insists
#   status NAME ...             a line: jaxserve-job STATE EXIT_STATUS ANSWERS ADDRESSES
#   log NAME LINES              the end of its log
#   table                       what the benchmark printed
#   make-batch KEY              the folder of one batch, for its files
#
# At most one job at a time: a TPU belongs to one process.
set -euo pipefail

SOURCE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$HOME/jaxserve-venv
JOBS=$HOME/jaxserve-jobs
# Seconds a job gets to end after SIGTERM; a server lets open answers finish first.
GRACE_SECONDS=${GRACE_SECONDS:-45}

say() { printf '%s: %s\n' "$(hostname)" "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

# -- setup ----------------------------------------------------------------------------------------

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Makes $VENV with the first Python of 3.11 to 3.13 that can; where there is none, uv brings one.
make_venv() {
    local python
    rm -rf "$VENV"
    for python in python3.12 python3.11 python3.13 python3; do
        if new_enough "$python" && "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            "$python" -m venv "$VENV"
            return
        fi
    done
    if new_enough python3; then # Ubuntu keeps venv in a package of its own
        sudo apt-get update -q && sudo apt-get install -q -y python3-venv
        python3 -m venv "$VENV"
        return
    fi
    python3 -m pip --version >/dev/null 2>&1 || { sudo apt-get update -q && sudo apt-get install -q -y python3-pip; }
    python3 -m pip install --quiet --user --upgrade uv
    "$HOME/.local/bin/uv" venv --quiet --seed --python 3.12 "$VENV"
}

dependencies() { cat "$SOURCE/setup.cfg" "$SOURCE/pyproject.toml" | cksum; }

setup() {
    if [[ -x $VENV/bin/jaxserve && $(cat "$VENV/dependencies" 2>/dev/null) == "$(dependencies)" ]]; then
        say "set up already, and no dependency changed: nothing to install"
        return
    fi
    if ! new_enough "$VENV/bin/python"; then make_venv; fi
    say "installing with $("$VENV/bin/python" --version)"
    "$VENV/bin/python" -m pip install --quiet --upgrade -e "${SOURCE}[tpu]"
    "$VENV/bin/python" -c 'import jax, jaxserve'
    dependencies >"$VENV/dependencies"
    say "installed"
}

# -- jobs -----------------------------------------------------------------------------------------

# Whether job $1 runs; a pid that now belongs to another program does not count.
alive() {
    local pid
    pid=$(cat "$JOBS/$1/pid" 2>/dev/null) && [[ $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) == *"on_host.sh run $1 "* ]]
}

# start NAME KEY WORD...: KEY tells batches apart, "-" for the others.
start() {
    local name=$1 key=$2 other
    shift 2
    [[ -x $VENV/bin/jaxserve ]] || fail "jaxserve is not installed here: tpu_scripts/setup.sh first"
    for other in server batch bench; do
        alive "$other" || continue
        case $name,$other in
        server,server) stop server ;;
        batch,batch)
            [[ $(cat "$JOBS/batch/key") == "$key" ]] || fail "another batch runs here: tpu_scripts/batch.sh --stop ends it"
            say "runs already"
            return
            ;;
        *,server) fail "a server has the TPU: tpu_scripts/serve.sh --stop ends it" ;;
        *) fail "a $other job has the TPU: wait for it, or tpu_scripts/$other.sh --stop ends it" ;;
        esac
    done
    mkdir -p "$JOBS/$name"
    cd "$JOBS/$name"
    rm -f exit
    [[ ! -e log ]] || mv log log.before
    printf '%s\n' "$key" >key
    case $name in
    server) set -- "$VENV/bin/jaxserve" serve "$@" ;;
    batch) set -- "$VENV/bin/jaxserve" batch "$JOBS/batches/$key/in.jsonl" "$JOBS/batches/$key/out.jsonl" "$@" ;;
    bench) set -- "$VENV/bin/python" "$SOURCE/benchmarks/kernels.py" "$@" ;;
    *) fail "there is no job '$name'" ;;
    esac
    # Without this JAX falls back to the processor when it does not get the TPU.
    export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
    if [[ -e $HOME/jaxserve-hosts-token ]]; then
        JAXSERVE_HOSTS_TOKEN=$(cat "$HOME/jaxserve-hosts-token")
        export JAXSERVE_HOSTS_TOKEN
    fi
    setsid nohup bash "$SOURCE/tpu_scripts/on_host.sh" run "$name" "$@" >log 2>&1 </dev/null &
    printf '%s\n' "$!" >pid
    say "started; its log is $JOBS/$name/log"
}

# run NAME WORD...: what start leaves behind. Hands SIGTERM on, and keeps the exit status.
run() {
    local name=$1 status=0 child=
    shift
    if [[ $name == bench ]]; then exec 4>"$JOBS/bench/table"; else exec 4>&1; fi
    trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM
    "$@" >&4 &
    child=$!
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the job
        status=0
        wait "$child" || status=$?
    done
    printf '%s\n' "$status" >"$JOBS/$name/exit"
}

stop() {
    local name=$1 pid tries=$((GRACE_SECONDS * 5))
    if ! alive "$name"; then
        say "no $name runs here"
        return
    fi
    pid=$(cat "$JOBS/$name/pid")
    kill -TERM "$pid"
    while alive "$name"; do
        if ((tries-- <= 0)); then # its whole process group; a TPU may need a moment afterwards
            kill -KILL -- "-$pid"
            say "the $name did not end within $GRACE_SECONDS s and was killed"
            return
        fi
        sleep 0.2
    done
    say "stopped the $name"
}

ready() {
    "$VENV/bin/python" - "$1" <<'PYTHON' 2>/dev/null
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1], timeout=5)
PYTHON
}

# status server URL, status batch KEY, status bench.
status() {
    local name=$1 about=${2:-} state=absent code=- count=0
    if alive "$name"; then
        state=running
    elif [[ -e $JOBS/$name/pid ]]; then
        state=ended
        code=$(cat "$JOBS/$name/exit" 2>/dev/null || echo killed)
    fi
    case $name in
    server) [[ $state != running ]] || ! ready "$about" || state=ready ;;
    batch)
        [[ $state == absent || $(cat "$JOBS/batch/key") == "$about" ]] || state=other
        [[ ! -e $JOBS/batches/$about/out.jsonl ]] || count=$(wc -l <"$JOBS/batches/$about/out.jsonl")
        ;;
    esac
    printf 'jaxserve-job %s %s %s %s\n' "$state" "$code" "$count" "$(hostname -I | tr -s ' ' ',')"
}

log() {
    say "the last lines of $JOBS/$1/log:"
    tail -n "$2" "$JOBS/$1/log" >&2
}

verb=${1:?verb}
shift
case $verb in
setup | start | stop | status | log | run) "$verb" "$@" ;;
table) cat "$JOBS/bench/table" ;;
make-batch) mkdir -p "$JOBS/batches/$1" ;;
*) fail "there is no verb '$verb'" ;;
esac
