"""The leader's observers, which decide nothing: log lines, samples, metrics, a rehearsal, commands after repairs."""
