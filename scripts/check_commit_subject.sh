#!/usr/bin/env bash
# Fail if the subject of the commit message in file $1 is longer than 72 characters or ends with a full stop.
set -euo pipefail
subject="$(head -n 1 "$1")"
if [ ${#subject} -gt 72 ]; then
    echo "commit subject has ${#subject} characters, at most 72 are allowed: $subject" >&2
    exit 1
fi
if [[ "$subject" == *. ]]; then
    echo "commit subject ends with a full stop: $subject" >&2
    exit 1
fi
