#!/usr/bin/env bash
# delete.sh [--yes] [--dry-run]
#
# Deletes TPU_NAME: the TPU VM or slice with its disks, and the queued resource of that name. Asks first. If there is
# nothing to delete, says so. Only this ends the costs: neither stopping the server nor a shutdown does.
#
#   --yes        does not ask
#   --dry-run    prints the gcloud commands and runs none
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

yes=
while (($#)); do
    case $1 in
    --yes | -y) yes=1 ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    *) fail 2 "what is '$1'? delete.sh --help tells the options" ;;
    esac
    shift
done
require TPU_NAME ZONE PROJECT

read_node
read_queue
if [[ -n $DRY_RUN ]]; then
    say "(if there is a queued resource, it is deleted with its TPU VM; else the TPU VM alone)"
    NODE_STATE='?' QUEUE_STATE='?'
fi
if [[ -z $NODE_STATE$QUEUE_STATE ]]; then
    say "there is nothing called '$TPU_NAME' in $ZONE of $PROJECT: nothing to delete"
    say "(what else a project pays for in a zone: gcloud compute tpus tpu-vm list --zone=$ZONE --project=$PROJECT)"
    exit
fi
if [[ $QUEUE_STATE == DELETING || (-z $QUEUE_STATE && $NODE_STATE == DELETING) ]]; then
    say "'$TPU_NAME' is being deleted already"
    exit
fi
if [[ -z $yes && -z $DRY_RUN ]]; then
    [[ -t 0 ]] || fail 2 "nobody is here to be asked: delete.sh --yes deletes '$TPU_NAME' without asking"
    read -r -p "Delete '$TPU_NAME' (${NODE_TYPE:-no TPU VM yet}, ${NODE_STATE:-$QUEUE_STATE}) in $ZONE of $PROJECT, with all that is on its disks? [y/N] " answer || true
    [[ ${answer:-} == [yY] || ${answer:-} == [yY][eE][sS] ]] || fail 1 "not deleted; it goes on costing money"
fi
if [[ -n $QUEUE_STATE ]]; then
    # --force: also the TPU VM that it holds, without which an active one is refused.
    cloud compute tpus queued-resources delete "$TPU_NAME" --zone="$ZONE" --project="$PROJECT" --force --quiet >&2
fi
if [[ -z $DRY_RUN && -n $QUEUE_STATE ]]; then read_node; fi
if [[ -n $NODE_STATE && $NODE_STATE != DELETING ]]; then
    cloud compute tpus tpu-vm delete "$TPU_NAME" --zone="$ZONE" --project="$PROJECT" --quiet >&2
fi
[[ -n $DRY_RUN ]] || say "'$TPU_NAME' is deleted"
