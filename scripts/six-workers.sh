#!/usr/bin/env bash
# Six workers train four blocks of 38M parameters: see docs/HOSTS.md.
set -euo pipefail
export CONFIG=${CONFIG:-wikitext2-38m} SETTINGS='swarm.codec=none'
source "$(dirname "$0")/across-hosts.sh"
