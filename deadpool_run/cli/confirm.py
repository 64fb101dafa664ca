"""A question before a command that ends something."""

import sys

import typer


def confirmed(question: str) -> bool:
    """Ask on a terminal; raises `typer.Abort` unless the answer is yes. False: there is no terminal to ask on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return typer.confirm(question, abort=True, err=True)
