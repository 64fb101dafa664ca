"""What accompanies a job at its leader and decides nothing: samples, metrics, a rehearsal, commands after repairs. Imports `chaos`, `records`, `processes` and below."""
