#!/usr/bin/env bash
# A worker, on machines that come and go: start it at boot, with HUB=HOST:PORT and a copy of the hub's token.
# Exit code 0 means that the run has ended, or that its hub was ended with Ctrl-C: with FOREVER=1 it then waits for the
# next. Exit code 2 is a mistake in the command. Anything else is a hub that is away, or a network: try again.
# SIGTERM, a cloud's last warning, makes the worker leave in order.
set -uo pipefail

trap 'kill -TERM "$worker" 2> /dev/null; wait "$worker"; exit 143' TERM INT
while true; do
    offbeat work "$HUB" --token-file "${TOKEN_FILE:-token}" --wait "${WAIT:-600}" &
    worker=$!
    wait "$worker"
    code=$?
    if [ $code = 2 ] || { [ $code = 0 ] && [ -z "${FOREVER:-}" ]; }; then exit $code; fi
    sleep "${PAUSE:-10}"
done
