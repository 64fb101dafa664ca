"""What users are shown of a run. No torch. Agent and command line import it."""
