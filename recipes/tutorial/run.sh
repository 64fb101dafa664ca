#!/bin/sh
# Two ranks and one spare on this machine.
exec deadpool-run --nproc-per-node 2 --spares 1 "$(dirname "$0")/train.py" "$@"
