"""Raises an exception with a text that no frame can hold, where the error file cannot be written."""

import os

os.environ["TORCHELASTIC_ERROR_FILE"] = "/nonexistent/error.json"

import deadpool_run as deadpool

deadpool.init()
raise ValueError("begin" + "x" * (8 << 20) + "end")
