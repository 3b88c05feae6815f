#!/usr/bin/env bash
# setup.sh [--no-sync] [--dry-run]
#
# Makes all hosts of TPU_NAME ready to serve: copies the working tree (sync.sh), makes a virtual environment with
# Python 3.11 or newer in ~/jaxserve-venv, and installs the project there with its `tpu` extra, editable, so that a
# later sync.sh is enough after a change. Run again it installs only if dependencies changed, and says so.
#
#   --no-sync    leaves out sync.sh
#   --dry-run    prints the gcloud commands and runs none
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

sync=1
while (($#)); do
    case $1 in
    --no-sync) sync= ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    *) fail 2 "what is '$1'? setup.sh --help tells the options" ;;
    esac
    shift
done
require TPU_NAME ZONE PROJECT
require_ready
[[ -z $sync ]] || "$SCRIPTS/sync.sh" ${DRY_RUN:+--dry-run}
on_host_script all setup
say "$HOSTS host(s) of $TPU_NAME are set up. Next: tpu_scripts/serve.sh MODEL"
