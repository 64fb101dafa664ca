"""The live status on a terminal: keys, sorting, scrolling. Commands import it."""
