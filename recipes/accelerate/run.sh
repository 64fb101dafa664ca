#!/bin/sh
# Four ranks and one spare on this machine. While it runs: deadpool-run kill-rank 2
exec deadpool-run --nproc-per-node 4 --spares 1 --preload deadpool_run.integrations.accelerate,transformers "$(dirname "$0")/train.py" "$@"
