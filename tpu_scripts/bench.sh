#!/usr/bin/env bash
# bench.sh [--dry-run] [FLAGS of benchmarks/kernels.py...]
# bench.sh --stop
#
# Runs benchmarks/kernels.py on TPU_NAME and prints its table here. On a slice all hosts run it, each on chips of its
# own (a slice only works when all of its hosts take part); the table is that of worker 0.
# With --json FILE the numbers stay there, in ~/jaxserve-jobs/bench/FILE.
#
#   --stop       stops the run
#   --dry-run    prints the gcloud commands and runs none
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source "$SCRIPTS/host_jobs.sh"

stop=''
while (($#)); do
    case $1 in
    --stop) stop=1 ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    *) break ;;
    esac
    shift
done
require TPU_NAME ZONE PROJECT
[[ -f $REPOSITORY/benchmarks/kernels.py ]] || fail 1 "there is no benchmarks/kernels.py in $REPOSITORY"
require_ready
if [[ -n $stop ]]; then
    on_host_script all stop bench
    exit
fi
on_host_script all start bench - "$@"
say "the benchmark runs"
progress() { :; }
await_job '' progress bench
if [[ $CODE != 0 ]]; then
    show_logs bench
    on_host_script all stop bench || true
    fail 1 "the benchmark ended with $CODE, log above"
fi
on_host_script 0 table
