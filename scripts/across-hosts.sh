#!/usr/bin/env bash
# The three commands of a run across hosts; three-hosts.sh and six-workers.sh say which run it is.
#
#   ... coordinator HOST[:PORT]   on a host that others can reach by that name; prints the invite
#   ... worker INVITE             on every host that trains; only outgoing connections
#   ... score INVITE OUT          anywhere, at any moment: fetches the model and scores it on test
#
# CONFIG and SETTINGS name the run. DATA, where it is set, is a glob of text files on the host: for a
# coordinator and a score instead of a download, for a worker instead of the coordinator's copy.
# DEVICE is a worker's, its own choice by default; FOLDER the coordinator's. The first command on a host
# installs into .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
blocktrain=.venv/bin/blocktrain

installed() {
  [ -x $blocktrain ] || make install EXTRAS=hub
}

case ${1:-} in
  coordinator)
    name=${2:?the name or address that others reach this host at}
    port=${name##*:}
    [ "$port" != "$name" ] || port=7070
    settings=()
    for setting in $SETTINGS ${DATA:+data.source=text:$DATA}; do settings+=(--set "$setting"); done
    installed
    exec $blocktrain coordinator --config "$CONFIG" "${settings[@]}" \
      --data-dir "${FOLDER:-runs/$(basename "$0" .sh)}" --listen "0.0.0.0:$port" --advertise "$name"
    ;;
  worker)
    invite=${2:?the invite}
    installed
    exec $blocktrain worker "$invite" --device "${DEVICE:-auto}" ${DATA:+--data "text:$DATA"}
    ;;
  score)
    invite=${2:?the invite} out=${3:?a new folder}
    installed
    $blocktrain fetch "$invite" --out "$out"
    exec $blocktrain eval "$out" --split test --device "${DEVICE:-auto}" ${DATA:+--data "text:$DATA"}
    ;;
  *)
    sed -n '2,11s/^# \{0,1\}//p' scripts/across-hosts.sh | sed "s|\.\.\.|$0|" >&2
    exit 2
    ;;
esac
