#!/usr/bin/env bash
#   bash examples/reproduce/cliphigher/run.sh [FLAGS OF miles sweep…]
source "$(dirname "${BASH_SOURCE[0]}")/../reproduce.sh"
reproduce cliphigher "$@"
