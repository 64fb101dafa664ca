#!/bin/sh
# Eight ranks (2 stages x 2 replicas x 2 tensor-parallel) and one spare. While it runs: deadpool-run kill-rank 2
exec deadpool-run --nproc-per-node 8 --spares 1 "$(dirname "$0")/train.py" "$@"
