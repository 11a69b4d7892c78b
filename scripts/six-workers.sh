#!/usr/bin/env bash
# Six workers train four blocks of 38M parameters: see docs/HOSTS.md.
set -euo pipefail
export CONFIG=${CONFIG:-wikitext2-38m} SETTINGS=${SETTINGS:-'swarm.codec=none swarm.quorum=6'}
source "$(dirname "$0")/across-hosts.sh"
