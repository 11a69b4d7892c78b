#!/usr/bin/env bash
# Three hosts train one small model, little bandwidth: see docs/HOSTS.md.
set -euo pipefail
export CONFIG=${CONFIG:-wikitext2-small} SETTINGS=${SETTINGS:-'swarm.codec=int8 swarm.grace_seconds=2'}
source "$(dirname "$0")/across-hosts.sh"
