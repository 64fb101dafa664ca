"""Status and plan of a run, as users see them. No torch. Agent and command line import it."""
