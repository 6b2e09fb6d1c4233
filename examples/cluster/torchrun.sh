#!/usr/bin/env bash
# A script under torchrun, on every one of NODES machines: NODE_RANK=0 MASTER=node1 bash examples/cluster/torchrun.sh
# The token is a file that holds the same on all of them.
set -euo pipefail

export OFFBEAT_TOKEN_FILE=${OFFBEAT_TOKEN_FILE:-token}
export OMP_NUM_THREADS=1
torchrun --nnodes "${NODES:-2}" --node-rank "$NODE_RANK" --nproc-per-node "${PROCESSES:-2}" \
    --master-addr "$MASTER" --master-port "${PORT:-29500}" \
    "${SCRIPT:-examples/train_digits.py}" "$@"
