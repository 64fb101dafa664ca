"""`deadpool-run` on a machine with five GPUs, as far as the launcher can see. No worker uses one."""

from deadpool_run.cli.app import main
from deadpool_run.cli.options import machine

if __name__ == "__main__":
    machine.count_gpus = lambda *_: 5
    machine.installed_version = lambda _: "2.15.0"  # not torch's CPU build
    main()
