"""`python -m deadpool_run` is `deadpool-run`."""

from deadpool_run.cli.app import main

if __name__ == "__main__":
    main()
