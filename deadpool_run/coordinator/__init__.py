"""The shell around the core: sole owner of its state, journal, control socket."""
