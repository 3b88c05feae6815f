#!/usr/bin/env bash
# batch.sh [--dry-run] MODEL IN.jsonl OUT.jsonl [FLAGS of jaxserve batch...]
# batch.sh --stop
#
# Answers a file of requests in OpenAI's batch format on TPU_NAME: copies IN.jsonl there, runs `jaxserve batch`, and
# brings the answers back to OUT.jsonl, those so far every five minutes and all at the end. The run goes on when this
# script, or the connection, ends; the same command finds it again, or goes on after the answers in OUT.jsonl if the
# TPU VM was taken away and made anew.
#
# On a slice of several hosts --distributed auto is added; --tensor-parallel N says over how many chips the model is
# split.
#
#   --stop       stops the run. The answers so far stay, and the same command goes on with it.
#   --dry-run    prints the gcloud commands and runs none
#
# SAVE_SECONDS=300 is how often answers are brought back meanwhile.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source "$SCRIPTS/host_jobs.sh"

stop=''
while (($#)); do
    case $1 in
    --stop) stop=1 ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    -*) fail 2 "what is '$1'? MODEL IN.jsonl OUT.jsonl come first; batch.sh --help tells more" ;;
    *) break ;;
    esac
    shift
done
if [[ -z $stop ]]; then
    (($# >= 3)) || fail 2 "what to run? As in: batch.sh MODEL IN.jsonl OUT.jsonl; batch.sh --help tells more"
    model=$1 input=$2 output=$3
    shift 3
    [[ -f $input && -r $input ]] || fail 2 "$input is no file that can be read"
    [[ ! $input -ef $output ]] || fail 2 "$output is the input, too; give the answers another file"
    [[ -d $(dirname -- "$output") && ! -d $output ]] || fail 2 "$output cannot be written: its folder is not there"
fi
require TPU_NAME ZONE PROJECT
require_ready
if [[ -n $stop ]]; then
    on_host_script all stop batch
    exit
fi

complete --model "$model" "$@"

# What is the same run: this model and these requests.
key=$({ printf '%s\n' "$model" && cat -- "$input"; } | cksum | tr ' ' -)
folder=jaxserve-jobs/batches/$key
total=$(grep -c . -- "$input" || true)

# fetch WORKER: brings the answers so far to $output, whole or not at all.
fetch() {
    copy_out "$1" "$folder/out.jsonl" "$TEMPORARY/out.jsonl"
    [[ -n $DRY_RUN ]] || mv -f -- "$TEMPORARY/out.jsonl" "$output"
}

saved=$SECONDS
progress() {
    say "$COUNT of $total answers"
    ((COUNT > 0 && SECONDS - saved >= ${SAVE_SECONDS:-300})) || return 0
    saved=$SECONDS
    (fetch "$WORKER") || say "the answers so far could not be brought here; trying again later"
}

STATE=absent COUNT=0
if [[ -n $DRY_RUN ]]; then
    on_host_script all status batch "$key"
else
    ask_job batch "$key" || { cat "$TEMPORARY/stderr" >&2 && fail 1 "the hosts could not be asked: setup.sh first?"; }
    judge
fi
if [[ $STATE == running ]]; then
    say "this batch runs there already"
else
    on_host_script all make-batch "$key"
    ln -s "$(cd "$(dirname -- "$input")" && pwd)/$(basename -- "$input")" "$TEMPORARY/in.jsonl"
    copy_in "$TEMPORARY/in.jsonl" "$folder/in.jsonl"
    here=0
    [[ ! -s $output ]] || here=$(wc -l <"$output")
    if ((here > COUNT)); then
        say "going on after the $((here)) answers in $output"
        ln -s "$(cd "$(dirname -- "$output")" && pwd)/$(basename -- "$output")" "$TEMPORARY/before.jsonl"
        copy_in "$TEMPORARY/before.jsonl" "$folder/out.jsonl"
    fi
    on_host_script all start batch "$key" "${FLAGS[@]}"
fi
trap 'say "it goes on at $TPU_NAME: the same command finds it again, batch.sh --stop ends it"; exit 130' INT
await_job '' progress batch "$key"
[[ $COUNT == 0 && -z $DRY_RUN ]] || fetch "$WORKER"
if [[ $CODE != 0 ]]; then
    show_logs batch
    on_host_script all stop batch || true
    fail 1 "the batch ended with $CODE after $COUNT of $total answers, log above; the same command goes on with it"
fi
[[ -n $DRY_RUN ]] || say "$output: $COUNT answers to $total requests"
