"""The shell around the core: owner of its state, journal and control socket."""
