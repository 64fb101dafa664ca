"""Output that does not count is marked, line by line, until the mark is lifted."""

import io
import logging
import sys
import threading

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


def test_loggers_and_prints_of_an_interrupted_step_are_marked_once(monkeypatch):
    printed, logged = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", logged)
    logger, handler = logging.getLogger("of the script"), logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [handler])
    output.install()  # the trial
    output.lift()
    for step in (1, 2):
        output.install(output.INTERRUPTED)
        output.install(output.INTERRUPTED)  # another thread has seen the loss, too
        logger.error("loss nan")
        print("step", step)
        thread = threading.Thread(target=print, args=("a checkpoint of step 0",))
        thread.start()
        thread.join()
        output.lift()  # of no rehearsal: nothing changes
        print("evaluated")
        output.lift(output.INTERRUPTED)
        logger.error("loss 1")
        print("step", step)
    assert (sys.stdout, sys.stderr, handler.stream) == (printed, logged, logged)
    assert logged.getvalue() == "[interrupted] loss nan\nloss 1\n" * 2
    assert printed.getvalue() == "".join(
        f"[interrupted] step {step}\na checkpoint of step 0\n[interrupted] evaluated\nstep {step}\n" for step in (1, 2)
    )


def test_a_script_that_runs_again_in_an_interrupted_step_is_marked_as_a_rehearsal(monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    output.install(output.INTERRUPTED)
    output.install()
    print("set-up")
    output.lift(output.INTERRUPTED)
    print("step 0")
    output.lift()
    print("step 7")
    assert printed.getvalue() == "[rehearsal] set-up\n[rehearsal] step 0\nstep 7\n"


def test_a_logger_of_set_up_is_marked_in_an_interrupted_step(monkeypatch):
    """A replacement made its handlers in its rehearsal, so they have the stream that was marked then."""
    logged = io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", logged)
    logger = logging.getLogger("of set-up")
    output.install()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
    logger.error("rehearsed")
    output.lift()
    output.install(output.INTERRUPTED)
    logger.error("interrupted")
    output.lift(output.INTERRUPTED)
    logger.error("repeated")
    assert logged.getvalue() == "[rehearsal] rehearsed\n[interrupted] interrupted\nrepeated\n"
