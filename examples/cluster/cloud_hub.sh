#!/usr/bin/env bash
# The hub, on a machine that stays. It waits for workers, and goes on where it was after a restart of the machine; a run
# that had no checkpoint yet begins anew.
set -euo pipefail

run=${RUN:-runs/cloud}
token=${TOKEN_FILE:-token}
[ -s "$token" ] || (umask 077; head -c 32 /dev/urandom | base64 > "$token")

if compgen -G "$run/*/checkpoint-0.offbeat" > /dev/null; then
    exec offbeat train --resume "$run"
fi
exec offbeat train digits async-fmb --workers "${WORKERS:-4}" --local-workers 0 \
    --listen "${LISTEN:-0.0.0.0:7700}" --token-file "$token" --out "$run" --overwrite "$@"
