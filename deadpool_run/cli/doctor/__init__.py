"""Checks of this machine for `deadpool-run doctor`: what a run needs, and a short run with a killed rank."""
