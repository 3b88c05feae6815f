#!/usr/bin/env bash
# serve.sh [--timeout SECONDS] [--dry-run] MODEL [FLAGS of jaxserve serve...]
# serve.sh --stop
#
# Starts `jaxserve serve MODEL` on all hosts of TPU_NAME, stopping an older server first, waits until it would answer a
# request, and prints how to reach it. The server goes on when this script, or the connection, ends. It listens on the
# TPU VM's own 127.0.0.1: only who can ssh to it can use it.
#
# MODEL is what the hosts can find: a name (jaxserve pull --list), a Hugging Face hub id, or a path there. On a slice of
# several hosts --distributed auto is added; --tensor-parallel N says over how many chips the model is split.
#
#   --timeout    stops waiting after that many seconds (1800) and shows the log; the server goes on
#   --stop       stops the server, so that batch.sh or bench.sh can have the TPU. The TPU VM costs as before.
#   --dry-run    prints the gcloud commands and runs none
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source "$SCRIPTS/host_jobs.sh"

timeout=1800 stop=''
while (($#)); do
    case $1 in
    --timeout)
        timeout=${2:-}
        whole_number --timeout "$timeout"
        shift
        ;;
    --stop) stop=1 ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    -*) fail 2 "what is '$1'? MODEL comes first, then the flags of jaxserve serve; serve.sh --help tells more" ;;
    *) break ;;
    esac
    shift
done
if [[ -z $stop ]]; then
    (($#)) || fail 2 "which MODEL? As in: serve.sh smollm2-135m-instruct; serve.sh --help tells more"
    model=$1
fi
require TPU_NAME ZONE PROJECT
require_ready
if [[ -n $stop ]]; then
    on_host_script all stop server
    exit
fi

host=127.0.0.1 port=8000
for ((i = 2; i <= $#; i++)); do
    next=$((i + 1))
    case ${!i} in
    --port) port=${!next:-$port} ;;
    --port=*) port=${!i#*=} ;;
    --host) host=${!next:-$host} ;;
    --host=*) host=${!i#*=} ;;
    esac
done
[[ $host != 0.0.0.0 ]] || host=127.0.0.1

complete "$@"
on_host_script all start server - "${FLAGS[@]}"
say "waiting until $model is loaded and compiled"
progress() { :; }
if ! await_job "$timeout" progress server "http://$host:$port/ready"; then
    show_logs server
    fail 1 "not ready after $timeout s, log above; it goes on: serve.sh --stop ends it"
fi
[[ -z $DRY_RUN ]] || exit 0
if [[ $STATE != ready ]]; then
    show_logs server
    on_host_script all stop server || true
    fail 1 "the server ended with ${CODE}, log above"
fi

tunnel=(gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --project="$PROJECT" --worker="$WORKER"
    ${SSH_FLAGS[@]+"${SSH_FLAGS[@]}"})
cat <<TEXT
ready: $model on $TPU_NAME

In one terminal, a tunnel to it:
  $(quoted "${tunnel[@]}") -- -N -L $port:$host:$port
In another:
  curl -N http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "stream": true}'
Its log:
  $(quoted "${tunnel[@]}") --command='tail -f jaxserve-jobs/server/log'
The TPU VM costs money until tpu_scripts/delete.sh.
TEXT
