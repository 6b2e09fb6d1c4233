#!/usr/bin/env bash
# A run under Open MPI, typed on one of the machines: bash examples/cluster/mpirun.sh
# Five processes are one hub and four workers. --with-ft ulfm lets the others go on when one of them is lost.
set -euo pipefail

hosts=${HOSTS:-$(dirname "$0")/hostfile}
exec mpirun --hostfile "$hosts" -n "${PROCESSES:-5}" --with-ft ulfm --bind-to none -x OMP_NUM_THREADS=1 \
    offbeat train digits async-fmb --out "${RUN:-runs/mpi}" "$@"
