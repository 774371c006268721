#!/usr/bin/env bash
#   bash examples/reproduce/dynamic/run.sh [FLAGS OF miles sweep…]
source "$(dirname "${BASH_SOURCE[0]}")/../reproduce.sh"
reproduce dynamic "$@"
