"""The leader's observers, which decide nothing: log lines, samples, metrics, a chaos run, commands after repairs."""
