#!/usr/bin/env bash
# sync.sh [--dry-run]
#
# Copies the working tree to ~/jaxserve-source on all hosts of TPU_NAME: the files that git tracks, as they are now,
# changes that are not committed included. Files that git does not track (secrets, models, build folders) stay here.
# What the hosts had is replaced; a running server keeps the old code until serve.sh starts it anew.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

while (($#)); do
    case $1 in
    --dry-run) DRY_RUN=1 ;;
    --help | -h) usage && exit ;;
    *) fail 2 "what is '$1'? sync.sh --help tells the options" ;;
    esac
    shift
done
require TPU_NAME ZONE PROJECT
cd "$REPOSITORY"
[[ $(git rev-parse --show-toplevel 2>/dev/null || true) -ef . ]] ||
    fail 1 "$REPOSITORY is no git checkout: clone the project with git, which knows what may be copied"
require_ready

# A tracked file that was deleted but not committed is not there to be copied.
git ls-files -z | while IFS= read -r -d '' file; do
    [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
done >"$TEMPORARY/files"
archive="$TEMPORARY/jaxserve-source.tar.gz"
COPYFILE_DISABLE=1 tar -czf "$archive" --null -T "$TEMPORARY/files"
untracked=$(git ls-files --others --exclude-standard | wc -l)
((untracked == 0)) || say "$((untracked)) file(s) that git does not track are not copied: git add them if they should be"

# shellcheck disable=SC2016 # the hosts' shell reads it
unpack='set -e
rm -rf jaxserve-source.new jaxserve-source.old
mkdir jaxserve-source.new
tar -xzf jaxserve-source.tar.gz -C jaxserve-source.new
if [ -e jaxserve-source ]; then mv jaxserve-source jaxserve-source.old; fi
mv jaxserve-source.new jaxserve-source
rm -rf jaxserve-source.old jaxserve-source.tar.gz'
copy_in "$archive" jaxserve-source.tar.gz
newline=$'\n'
on_hosts all bash -c "${unpack//$newline/; }"
say "copied $(tr -cd '\0' <"$TEMPORARY/files" | wc -c | tr -d ' ') files to $HOSTS host(s) of $TPU_NAME"
