# shellcheck shell=bash disable=SC2034 # those who source this read what it sets
# Sourced by every script here: the variables that say which TPU is meant, what a script says when one is missing,
# and the calls of gcloud. Works in bash 3.2 (macOS) and later. Messages go to stderr, results to stdout.

set -euo pipefail

SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export REPOSITORY=${SCRIPTS%/*}
# Seconds between two looks at something that is awaited.
POLL_SECONDS=${POLL_SECONDS:-15}
# More words for every ssh and scp of gcloud, as in TPU_SSH_FLAGS="--internal-ip".
read -r -a SSH_FLAGS <<<"${TPU_SSH_FLAGS:-}" || true
DRY_RUN=
TEMPORARY=$(mktemp -d)
trap 'rm -rf "$TEMPORARY"' EXIT
# What --dry-run prints reaches stdout even where a function's output is caught.
exec 3>&1

say() { printf '%s\n' "$*" >&2; }

# fail STATUS MESSAGE...: 2 for what was asked wrongly, 1 for what went wrong.
fail() {
    local status=$1
    shift
    say "${0##*/}: $*"
    exit "$status"
}

# Prints the comment at the top of the script, as far as it is for people.
usage() { sed -n -e '/^# shellcheck/q' -e '2,$s/^# \{0,1\}//p' "$0"; }

# quoted WORD...: the words as bash would read them back, one line.
quoted() {
    local word line=
    for word in "$@"; do line+=" $(printf '%q' "$word")"; done
    printf '%s' "${line# }"
}

print_call() { printf '%s\n' "$(quoted "$@")" >&3; }

example() {
    case $1 in
    TPU_NAME) echo "my-tpu (any name: lower-case letters, digits and hyphens)" ;;
    ZONE) echo "us-east5-b (zones with TPUs: https://docs.cloud.google.com/tpu/docs/regions-zones)" ;;
    PROJECT) echo "my-project-id (yours: gcloud projects list)" ;;
    ACCELERATOR_TYPE) echo "v6e-1 (others: tpu_scripts/accelerator_types.tsv)" ;;
    esac
}

# require NAME...: ends with 2 unless all these variables are set, naming each that is not.
require() {
    local name missing=
    for name in "$@"; do
        [[ -z ${!name:-} ]] || continue
        missing=1
        say "${0##*/}: $name is not set: export $name=$(example "$name")"
    done
    [[ -z $missing ]] || exit 2
    [[ $TPU_NAME =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
        fail 2 "TPU_NAME is '$TPU_NAME': lower-case letters, digits and hyphens, a letter first, no hyphen last"
    [[ -n $DRY_RUN ]] || command -v gcloud >/dev/null ||
        fail 2 "gcloud is not installed: https://docs.cloud.google.com/sdk/docs/install"
}

# cloud WORD...: runs gcloud; with --dry-run prints the call instead. A failure ends the script with gcloud's status.
cloud() {
    local status=0
    if [[ -n $DRY_RUN ]]; then
        print_call gcloud "$@"
        return
    fi
    gcloud "$@" || status=$?
    ((status == 0)) || fail "$status" "gcloud ended with $status: $(quoted gcloud "$@")"
}

# describe tpu-vm|queued-resources FORMAT: what gcloud says of TPU_NAME; nothing if there is no such thing.
describe() {
    local status=0
    local call=(gcloud compute tpus "$1" describe "$TPU_NAME" --zone="$ZONE" --project="$PROJECT" --format="$2")
    if [[ -n $DRY_RUN ]]; then
        print_call "${call[@]}"
        return
    fi
    "${call[@]}" 2>"$TEMPORARY/stderr" || status=$?
    ((status == 0)) && return
    grep -q -e NOT_FOUND -e 'was not found' "$TEMPORARY/stderr" && return
    cat "$TEMPORARY/stderr" >&2
    fail "$status" "gcloud ended with $status: $(quoted "${call[@]}")"
}

# Sets NODE_STATE ("" if there is no such TPU VM), NODE_TYPE, and NODE_IPS: the hosts' addresses in order of --worker.
read_node() {
    local facts ips
    facts=$(describe tpu-vm 'value(state,acceleratorType,networkEndpoints[].ipAddress)')
    IFS=$'\t' read -r NODE_STATE NODE_TYPE ips <<<"$facts" || true
    NODE_TYPE=${NODE_TYPE##*/}
    read -r -a NODE_IPS <<<"${ips//[;,]/ }" || true
}

# Sets QUEUE_STATE: the queued resource's state, "" if there is none.
read_queue() { QUEUE_STATE=$(describe queued-resources 'value(state.state)'); }

# Sets CHIPS, HOSTS and RUNTIME of an accelerator type, all "" if the table does not have it.
look_up() {
    local type chips hosts runtime
    CHIPS='' HOSTS='' RUNTIME=''
    while read -r type chips hosts runtime; do
        [[ $type == "$1" ]] || continue
        CHIPS=$chips HOSTS=$hosts RUNTIME=$runtime
    done <"$SCRIPTS/accelerator_types.tsv"
}

# Ends with 1 unless the TPU VM is READY. Sets NODE_IPS, CHIPS ("" if unknown) and HOSTS, its number of hosts.
require_ready() {
    read_node
    if [[ -n $DRY_RUN ]]; then
        look_up "${ACCELERATOR_TYPE:-}"
        HOSTS=${HOSTS:-1}
        return
    fi
    [[ -n $NODE_STATE ]] || fail 1 "there is no TPU VM '$TPU_NAME' in $ZONE of $PROJECT: tpu_scripts/create.sh makes one"
    [[ $NODE_STATE == READY ]] ||
        fail 1 "TPU VM '$TPU_NAME' is $NODE_STATE, not READY: wait, or tpu_scripts/delete.sh and create.sh again"
    look_up "$NODE_TYPE"
    HOSTS=${#NODE_IPS[@]}
}

# on_hosts WORKER|all WORD...: runs the words as one command on these hosts, in the home folder.
on_hosts() {
    local worker=$1
    shift
    cloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --project="$PROJECT" --worker="$worker" \
        ${SSH_FLAGS[@]+"${SSH_FLAGS[@]}"} --command="$(quoted "$@")"
}

# on_host_script WORKER|all VERB...: the same through on_host.sh, which sync.sh has brought there.
on_host_script() {
    local worker=$1
    shift
    on_hosts "$worker" bash jaxserve-source/tpu_scripts/on_host.sh "$@"
}

# copy_in FILE REMOTE: to all hosts. copy_out WORKER REMOTE FILE: from one. Remote paths start in the home folder.
copy_in() { copy "$1" "$TPU_NAME:$2" --worker=all; }
copy_out() { copy "$TPU_NAME:$2" "$3" --worker="$1"; }
copy() {
    local from=$1 to=$2
    shift 2
    cloud compute tpus tpu-vm scp "$from" "$to" --zone="$ZONE" --project="$PROJECT" "$@" \
        ${SSH_FLAGS[@]+"${SSH_FLAGS[@]}"} >&2
}

# has_flag NAME WORD...: whether --NAME or --NAME=... is among the words.
has_flag() {
    local name=$1 word
    shift
    for word in "$@"; do
        [[ $word != "--$name" && $word != "--$name="* ]] || return 0
    done
    return 1
}

# whole_number OPTION VALUE: ends with 2 unless the value is a number of seconds.
whole_number() { [[ $2 =~ ^[0-9]+$ ]] || fail 2 "$1 wants a whole number of seconds, not '$2'"; }
