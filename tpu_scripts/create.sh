#!/usr/bin/env bash
# create.sh [--spot] [--queued] [--no-wait] [--timeout SECONDS] [--dry-run] [-- GCLOUD_FLAGS...]
#
# Makes the TPU VM or slice TPU_NAME of ACCELERATOR_TYPE in ZONE of PROJECT and waits until it is READY. If it is there
# already, says so and does nothing. It costs money until delete.sh.
#
#   --spot       cheaper, and may be taken away at any time
#   --queued     asks through a queued resource (of the same name), which waits for free chips instead of failing
#   --no-wait    returns when the request was taken; the same command again waits for it
#   --timeout    stops waiting after that many seconds (never); the request stays
#   --dry-run    prints the gcloud commands and runs none
#   --           what follows goes to gcloud's create, as in -- --network=my-network --internal-ips
#
# RUNTIME_VERSION overrides the software version of accelerator_types.tsv.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

spot='' queued='' wait=1 timeout=''
while (($#)); do
    case $1 in
    --spot) spot=1 ;;
    --queued) queued=1 ;;
    --no-wait) wait= ;;
    --timeout)
        timeout=${2:-}
        whole_number --timeout "$timeout"
        shift
        ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    --) shift && break ;;
    *) fail 2 "what is '$1'? create.sh --help tells the options; flags for gcloud stand after --" ;;
    esac
    shift
done
require TPU_NAME ZONE PROJECT ACCELERATOR_TYPE

case $ACCELERATOR_TYPE in
tpu7* | v7* | ironwood*)
    fail 2 "$ACCELERATOR_TYPE: the Cloud TPU API has no TPU7x (Ironwood); Google gives it through Compute Engine" \
        "and Kubernetes Engine only, which these scripts do not drive: see tpu_scripts/README.md"
    ;;
esac
look_up "$ACCELERATOR_TYPE"
RUNTIME=${RUNTIME_VERSION:-$RUNTIME}
[[ -n $RUNTIME ]] || fail 2 "ACCELERATOR_TYPE is '$ACCELERATOR_TYPE', which tpu_scripts/accelerator_types.tsv does" \
    "not have: choose one of it, or export RUNTIME_VERSION=... (gcloud compute tpus tpu-vm versions list)"

# Asks for the TPU VM or the queued resource. Further words are gcloud's flags.
ask() {
    local kind=tpu-vm flags=(--zone="$ZONE" --project="$PROJECT" --accelerator-type="$ACCELERATOR_TYPE")
    [[ -z $spot ]] || flags+=(--spot)
    if [[ -n $queued ]]; then
        kind='queued-resources'
        flags+=(--runtime-version="$RUNTIME" --node-id="$TPU_NAME")
    else
        flags+=(--version="$RUNTIME")
        [[ -n $wait ]] || flags+=(--async)
    fi
    cloud compute tpus "$kind" create "$TPU_NAME" "${flags[@]}" "$@" >&2
}

# Prints the details of a request that will never be filled, and ends with 1.
give_up() {
    cloud compute tpus queued-resources describe "$TPU_NAME" --zone="$ZONE" --project="$PROJECT" >&2
    fail 1 "the queued resource '$TPU_NAME' is $QUEUE_STATE and will not become active: see above;" \
        "tpu_scripts/delete.sh removes it, then create.sh asks anew"
}

# Returns when the TPU VM is READY; tells each new state, and once a minute that it still waits.
await() {
    local start=$SECONDS told='' told_at=0 now state
    while :; do
        read_node
        QUEUE_STATE=
        [[ $NODE_STATE == READY ]] || read_queue
        case $QUEUE_STATE in FAILED | SUSPENDED | SUSPENDING) give_up ;; esac
        case $NODE_STATE in
        READY) return ;;
        PREEMPTED | TERMINATED | STOPPED | DELETING)
            fail 1 "TPU VM '$TPU_NAME' is $NODE_STATE: tpu_scripts/delete.sh, then create.sh again"
            ;;
        esac
        [[ -n $NODE_STATE$QUEUE_STATE ]] || fail 1 "'$TPU_NAME' has gone while it was awaited: create.sh asks anew"
        now=$((SECONDS - start)) state=${QUEUE_STATE:-$NODE_STATE}
        if [[ $state != "$told" ]] || ((now - told_at >= 60)); then
            say "$TPU_NAME: $state (after ${now} s)"
            told=$state told_at=$now
        fi
        [[ -z $timeout ]] || ((now < timeout)) ||
            fail 1 "'$TPU_NAME' is still $state after $now s. The request stays: create.sh waits on, delete.sh ends it"
        sleep "$POLL_SECONDS"
    done
}

read_node
read_queue
if [[ -n $NODE_TYPE && $NODE_TYPE != "$ACCELERATOR_TYPE" ]]; then
    fail 1 "'$TPU_NAME' exists and is a $NODE_TYPE, not a $ACCELERATOR_TYPE: choose another TPU_NAME, or delete.sh first"
fi
if [[ $NODE_STATE == READY ]]; then
    say "$TPU_NAME ($NODE_TYPE) is there already and READY: nothing to do"
elif [[ -n $NODE_STATE$QUEUE_STATE ]]; then
    say "$TPU_NAME was asked for already"
else
    say "asking for $TPU_NAME: $ACCELERATOR_TYPE${CHIPS:+ ($CHIPS chips, $HOSTS hosts)}${spot:+, spot}, in $ZONE"
    ask "$@"
fi
if [[ -n $DRY_RUN ]]; then
    [[ -z $wait ]] || say "(then the two describe commands again every $POLL_SECONDS s, until READY)"
    exit
fi
if [[ -z $wait ]]; then
    say "not waiting: the same command without --no-wait does"
    exit
fi
await
say "$TPU_NAME is READY: ${#NODE_IPS[@]} host(s). It costs money until tpu_scripts/delete.sh. Next: tpu_scripts/setup.sh"
