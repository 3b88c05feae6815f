# shellcheck shell=bash disable=SC2034 # those who source this read what it sets
# Sourced by serve.sh, batch.sh and bench.sh after settings.sh: what runs on the hosts after the ssh connection that
# started it has gone (on_host.sh keeps it), asked about from here until it is ready or has ended.

# complete WORD...: sets FLAGS to these flags of jaxserve and what a slice of several hosts needs besides, and gives the
# hosts a token by which they know each other. Ends with 2 if a slice's --tensor-parallel is missing.
complete() {
    FLAGS=("$@")
    if ! has_flag tensor-parallel "$@"; then
        ((HOSTS == 1)) || fail 2 "$TPU_NAME has $HOSTS hosts${CHIPS:+ and $CHIPS chips}: say --tensor-parallel" \
            "${CHIPS:-N} (the model's KV heads must divide by it)"
        [[ ${CHIPS:-1} == 1 ]] || say "using 1 of $CHIPS chips; --tensor-parallel $CHIPS splits the model over all"
    fi
    ((HOSTS > 1)) || return 0
    has_flag distributed "$@" || FLAGS+=(--distributed auto)
    (umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$TEMPORARY/token")
    copy_in "$TEMPORARY/token" jaxserve-hosts-token
}

# worker_of IP,IP,...: the --worker number of the host with one of these addresses.
worker_of() {
    local worker
    for worker in "${!NODE_IPS[@]}"; do
        [[ ",$1," != *",${NODE_IPS[$worker]},"* ]] || { echo "$worker" && return; }
    done
    echo 0
}

# ask_job NAME WORD...: asks every host about its job. Sets REPORTS, a line "STATE CODE COUNT WORKER" for each.
# Returns 1 if they could not be asked; what gcloud said is then in $TEMPORARY/stderr.
ask_job() {
    local answer tag state code count ips
    REPORTS=
    answer=$( (on_host_script all status "$@") 2>"$TEMPORARY/stderr") || return 1
    while read -r tag state code count ips; do
        [[ $tag == jaxserve-job ]] || continue
        REPORTS+="$state $code $count $(worker_of "$ips")"$'\n'
    done <<<"$answer"
    [[ -n $REPORTS ]]
}

# Sets STATE, CODE, COUNT and WORKER from REPORTS: of a host whose job failed, else of one that is ready, else of
# one that still runs, else of the one with the most answers.
judge() {
    local state code count worker rank best=-1
    while read -r state code count worker; do
        case $state in
        ended) if [[ $code == 0 ]]; then rank=0; else rank=3; fi ;;
        ready) rank=2 ;;
        running) rank=1 ;;
        *) rank=0 ;;
        esac
        ((rank > best || (rank == best && count > COUNT))) || continue
        best=$rank STATE=$state CODE=$code COUNT=$count WORKER=$worker
    done <<<"${REPORTS%$'\n'}"
}

# await_job TIMEOUT PROGRESS NAME WORD...: asks every POLL_SECONDS until the job is ready or has ended on the hosts
# (sets what judge sets), calling PROGRESS in between. Returns 1 after TIMEOUT seconds ("" for never).
await_job() {
    local timeout=$1 progress=$2 start=$SECONDS misses=0
    shift 2
    if [[ -n $DRY_RUN ]]; then
        on_host_script all status "$@"
        say "(the same every $POLL_SECONDS s until it is ready or has ended)"
        STATE=ended CODE=0 COUNT=0 WORKER=0
        return
    fi
    while :; do
        if ask_job "$@"; then
            misses=0
            judge
            [[ $STATE == running ]] || return 0
            "$progress"
        else
            misses=$((misses + 1))
            ((misses < 5)) || lost
            say "the hosts of $TPU_NAME do not answer (try $misses of 5)"
        fi
        [[ -z $timeout ]] || ((SECONDS - start < timeout)) || return 1
        sleep "$POLL_SECONDS"
    done
}

# Ends with 1, telling what became of hosts that do not answer.
lost() {
    cat "$TEMPORARY/stderr" >&2
    read_node
    [[ $NODE_STATE == READY ]] || fail 1 "TPU VM '$TPU_NAME' is ${NODE_STATE:-gone}: tpu_scripts/delete.sh, create.sh," \
        "setup.sh, and then this command again"
    fail 1 "the hosts of '$TPU_NAME' do not answer, though it is READY; what was started there goes on"
}

# show_logs NAME: the last lines of the job's log on every host.
show_logs() { on_host_script all log "$1" 40 >&2 || true; }
