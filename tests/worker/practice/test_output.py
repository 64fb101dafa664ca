"""Output of a rehearsal is marked, line by line, until the mark is lifted."""

import io
import logging
import sys

from deadpool_run.worker.practice import output


def test_lines_are_marked_once_each():
    inner = io.StringIO()
    stream = output.MarkedStream(inner)
    assert stream.write("one\ntwo") == 7
    stream.write(" and more\n\nthree\n")
    assert inner.getvalue() == "[rehearsal] one\n[rehearsal] two and more\n[rehearsal] \n[rehearsal] three\n"


def test_carriage_returns_begin_no_line():
    inner = io.StringIO()
    stream = output.MarkedStream(inner)
    for percent in (1, 2):
        stream.write(f"\r{percent}%")
    stream.write("\ndone\n")
    assert inner.getvalue() == "[rehearsal] \r1%\r2%\n[rehearsal] done\n"


def test_a_handler_that_keeps_the_stream_is_unmarked_too(monkeypatch):
    inner = io.StringIO()
    monkeypatch.setattr(sys, "stderr", inner)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output.install()
    handler = logging.StreamHandler()
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "rehearsed", (), None))
    output.lift()
    assert sys.stderr is inner
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "true", (), None))
    assert inner.getvalue() == "[rehearsal] rehearsed\ntrue\n"
