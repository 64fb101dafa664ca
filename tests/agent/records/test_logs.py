"""Where output goes: torchrun's log tree, the console with a prefix, or the console as it is."""

import os
import socket
import threading
from pathlib import Path

import pytest

from deadpool_run.agent.console import Console
from deadpool_run.agent.records import logs as output
from deadpool_run.agent.records.logs import Logs, line_prefix
from deadpool_run.agent.spec import LOGS_OFF, LaunchSpec, Mode, Streams, Target
from deadpool_run.core.settings import Settings


@pytest.fixture
def spec(tmp_path):
    def make(**fields):
        return LaunchSpec(
            settings=Settings(world_size=2),
            target=Target(Mode.EXEC, ("/bin/true",)),
            nproc_per_node=2,
            run_id="job",
            run_dir=tmp_path / "run",
            **fields,
        )

    return make


@pytest.fixture
def console(monkeypatch):
    """Pipes in place of the console's descriptors; read what was written by `seen()`."""
    reader, writer = os.pipe()
    monkeypatch.setattr(
        output, "_STREAMS", tuple(output._Stream(each.name, each.flag, writer) for each in output._STREAMS)
    )
    open_ends = [reader, writer]

    def seen():
        os.close(open_ends.pop())
        with os.fdopen(open_ends.pop(), "rb") as file:
            return file.read()

    yield seen
    for fd in open_ends:
        os.close(fd)


def write(fds, **texts):
    for name, text in texts.items():
        os.write(fds[name], text)
    for fd in fds.values():
        os.close(fd)


def target_of(fd):
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_by_default_nothing_is_touched(spec):
    out = Logs(spec())
    out.begin(0)
    assert out.open(0, 0) == {}
    assert out.error_file(1) == str(out.root / "attempt_0" / "1" / "error.json")
    assert out.root.parent == out._spec.run_dir / "logs"
    assert out.root.name.startswith("job_")
    out.close()


def test_redirected_streams_are_in_torchruns_tree(spec, tmp_path):
    out = Logs(spec(log_dir=tmp_path / "logs", redirects={0: Streams.BOTH, 1: Streams.ERR}))
    for generation in (0, 1):
        out.begin(generation)
        write(out.open(0, 0), stdout=b"a\n", stderr=b"b\n")
        write(out.open(1, 1), stderr=b"c\n")
    write(out.open(0, 0), stdout=b"promoted\n")  # a spare in the rank's place goes on in its file
    out.close()
    attempt = {"0/stdout.log": b"a\n", "0/stderr.log": b"b\n", "1/stderr.log": b"c\n"}
    expected = {f"attempt_{generation}/{name}": text for generation in (0, 1) for name, text in attempt.items()}
    assert tree(out.root) == expected | {"attempt_1/0/stdout.log": b"a\npromoted\n"}


def test_a_tee_writes_files_and_prefixed_lines(spec, console, tmp_path):
    tee = {0: Streams.BOTH, 1: Streams.OUT}
    out = Logs(spec(log_dir=tmp_path, tee=tee, duplicate_stdout_filters=("loss",)))
    out.begin(0)
    write(out.open(0, 0), stdout=b"one\nloss 2\nunended", stderr=b"warning\n")
    write(out.open(1, 1), stdout=b"loss 3\n")
    out.close()
    assert sorted(console().splitlines()) == [
        b"[default0]:loss 2",
        b"[default0]:one",
        b"[default0]:unended",
        b"[default0]:warning",
        b"[default1]:loss 3",
    ]
    found = tree(out.root)
    assert sorted(found.pop("attempt_0/filtered_stdout.log").splitlines()) == [
        b"[default0]:loss 2",
        b"[default1]:loss 3",
    ]
    assert found == {
        "attempt_0/0/stdout.log": b"one\nloss 2\nunended",
        "attempt_0/0/stderr.log": b"warning\n",
        "attempt_0/1/stdout.log": b"loss 3\n",
    }


def test_the_filter_hides_other_ranks_from_the_console_only(spec, console, tmp_path):
    out = Logs(spec(log_dir=tmp_path, tee={0: Streams.OUT, 1: Streams.OUT}, local_ranks_filter=frozenset({1})))
    out.begin(0)
    hidden = out.open(0, 0)
    assert target_of(hidden["stderr"]) == os.devnull
    write(hidden, stdout=b"hidden\n")
    write(out.open(1, 1), stdout=b"shown\n")
    out.close()
    assert console() == b"[default1]:shown\n"
    assert tree(out.root)["attempt_0/0/stdout.log"] == b"hidden\n"


def test_a_rank_on_a_gpu_of_a_spare_keeps_the_streams_of_its_first_place(spec, tmp_path):
    out = Logs(spec(log_dir=tmp_path, redirects={1: Streams.OUT}, devices=3))
    out.begin(0)
    write(out.open(2, 1), stdout=b"moved\n")
    assert out.open(2, 0) == {}
    out.close()
    assert tree(out.root) == {"attempt_0/2/stdout.log": b"moved\n"}


def test_the_file_of_filtered_lines_is_there_without_a_line(spec, tmp_path):
    out = Logs(spec(log_dir=tmp_path, duplicate_stderr_filters=("loss",)))
    out.begin(0)
    out.close()
    assert tree(out.root) == {"attempt_0/filtered_stderr.log": b""}


def test_without_logs_everything_goes_to_the_console(spec, tmp_path):
    out = Logs(spec(log_dir=LOGS_OFF, tee={0: Streams.OUT}, redirects={1: Streams.BOTH}))
    out.begin(0)
    assert out.open(0, 0) == out.open(1, 1) == {}
    assert (out.root, out.error_file(0)) == (None, "")
    assert list(tmp_path.iterdir()) == []


def test_a_console_that_went_away_costs_no_file(spec, monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(output, "_STREAMS", (output._Stream("stdout", Streams.OUT, writer),))
    out = Logs(spec(log_dir=tmp_path, tee={0: Streams.OUT}))
    out.begin(0)
    text = b"line\n" * 100_000
    fds = out.open(0, 0)
    feeder = threading.Thread(target=write, args=(fds,), kwargs={"stdout": text})
    feeder.start()
    feeder.join(20)
    out.close()
    os.close(writer)
    assert not feeder.is_alive()
    assert tree(out.root)["attempt_0/0/stdout.log"] == text


def test_a_console_that_does_not_block_loses_nothing(spec, monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    monkeypatch.setattr(output, "_STREAMS", (output._Stream("stdout", Streams.OUT, writer),))
    out = Logs(spec(log_dir=tmp_path, tee={0: Streams.OUT}))
    out.begin(0)
    lines = [b"%06d" % number for number in range(40_000)]
    feeder = threading.Thread(target=write, args=(out.open(0, 0),), kwargs={"stdout": b"\n".join(lines) + b"\n"})
    feeder.start()
    got = b""
    while got.count(b"\n") < len(lines):
        got += os.read(reader, 1 << 16)
    feeder.join(20)
    out.close()
    for fd in (reader, writer):
        os.close(fd)
    assert got.splitlines() == [b"[default0]:" + line for line in lines]


def test_a_pager_that_reads_nothing_stalls_no_worker_and_costs_no_file(spec, monkeypatch, tmp_path):
    reader, writer = os.pipe()
    monkeypatch.setattr(output, "_STREAMS", (output._Stream("stdout", Streams.OUT, writer),))
    out = Logs(spec(log_dir=tmp_path, tee={0: Streams.OUT}))
    out.begin(0)
    text = b"".join(b"%07d\n" % number for number in range(400_000))
    write(out.open(0, 0), stdout=text)  # by this thread: it would wait for ever
    log = out.root / "attempt_0" / "0" / "stdout.log"
    while not log.exists() or log.stat().st_size < len(text):
        os.sched_yield()
    assert out.dropped == 0
    assert out.console.dropped > 0
    feeder = threading.Thread(target=lambda: (out.close(), os.close(writer)))
    feeder.start()
    with os.fdopen(reader, "rb") as pipe:
        shown = pipe.read().splitlines()
    feeder.join(20)
    lines = [int(line.removeprefix(b"[default0]:")) for line in shown if line.startswith(b"[")]
    dropped = [int(line.split()[1]) for line in shown if line.endswith(b"the console did not accept them")]
    assert lines == sorted(lines)
    assert len(lines) + len(dropped) == len(shown)
    assert len(lines) + sum(dropped) == 400_000


def test_a_log_file_that_cannot_be_opened_in_time_delays_nobody_and_gets_everything(spec, monkeypatch, tmp_path):
    """FIFOs without a reader are in their place. Nobody waits a second time, and the worker writes at once."""
    monkeypatch.setattr(output, "_OPEN_TIMEOUT_S", 0.2)
    out = Logs(spec(log_dir=tmp_path, redirects={0: Streams.BOTH}))
    out.begin(0)
    folder = out.root / "attempt_0" / "0"
    while (fd := out._opener.open(out.root / "until the folders are made")) is None:
        pass
    os.close(fd)
    for name in ("stdout.log", "stderr.log"):
        os.mkfifo(folder / name)
    fds = out.open(0, 0)
    monkeypatch.setattr(output, "_OPEN_TIMEOUT_S", 3600.0)
    write(out.open(0, 0))
    write(fds, stdout=b"early\n")
    found = {}

    def read(name):
        with (folder / name).open("rb") as file:
            found[name] = file.read()

    readers = [threading.Thread(target=read, args=(name,)) for name in ("stdout.log", "stderr.log")]
    for reader in readers:
        reader.start()
    out.close()
    for reader in readers:
        reader.join()
    assert found == {"stdout.log": b"early\n", "stderr.log": b""}


def test_the_prefix_follows_torchruns_template():
    assert line_prefix("", "trainer", 3, 7) == b"[trainer3]:"
    template = "${role_name}/$rank/${local_rank} $$ ${other}> "
    assert line_prefix(template, "trainer", 3, 7) == b"trainer/7/3 $ ${other}> "
    assert line_prefix("${hostname}:${rank}: ", "trainer", 3, 7) == f"{socket.gethostname()}:7: ".encode()


@pytest.mark.parametrize("given", ["as an option", "in the environment", "both"])
def test_the_template_of_the_command_line_wins(cluster, tmp_path, given):
    option = ("--log-line-prefix-template", "option ${rank}> ") if given != "in the environment" else ()
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "variable ${rank}> "} if given != "as an option" else {}
    options = ("--start-method", "spawn", "--log-dir", str(tmp_path / "logs"), "--tee", "1", *option)
    job = cluster(str(tmp_path), script="report.py", nproc=1, spares=0, options=options, env=env)
    assert job.wait_exit() == 0, job.told()
    assert job.stdout == f"{'variable' if given == 'in the environment' else 'option'} 0> out of 0\n"


def test_a_job_with_tee_and_redirects(cluster, tmp_path):
    options = ("--start-method", "spawn", "--log-dir", str(tmp_path / "logs"), "--tee", "0:3", "--redirects", "1:3")
    job = cluster(str(tmp_path), script="report.py", nproc=2, spares=0, options=options)
    assert job.wait_exit() == 0, job.told()
    assert job.stdout == "[default0]:out of 0\n"
    assert "[default0]:err of 0\n" in job.stderr
    (root,) = (tmp_path / "logs").iterdir()
    logs = {name: text for name, text in tree(root).items() if name.endswith(".log")}
    assert logs == {
        f"attempt_0/{rank}/std{stream}.log": f"{stream} of {rank}\n".encode()
        for rank in (0, 1)
        for stream in ("out", "err")
    }


def test_a_failing_rank_writes_torchruns_error_file(cluster, tmp_path):
    job = cluster(str(tmp_path / "absent"), script="report.py", nproc=1, spares=0, options=("--log-dir", str(tmp_path)))
    assert job.wait_exit() == 1, job.told()
    (error,) = tmp_path.glob("*/attempt_0/0/error.json")
    assert "FileNotFoundError" in error.read_text()


def test_a_traceback_that_all_ranks_have_is_shown_once(spec):
    reader, writer = os.pipe()
    shown = Console()
    shown._streams[2] = shown.stream(writer)
    logs = Logs(spec(), shown)
    first, second = "Traceback:\nValueError: 1\n", "Traceback:\nValueError: 2\n"
    for text in (first, first, second, first):
        logs.show_traceback(text)
    both = f"--- rank 0, worker 0 ---\n{first.rstrip()}\n--- rank 1, worker 1 ---\n{second.rstrip()}"
    assert logs.without_shown(both) == ""
    unseen = "--- rank 2, worker 2 ---\nTraceback:\nValueError: 3"
    assert logs.without_shown(f"{both}\n{unseen}") == unseen
    logs.close()
    shown.close(10)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == first + second
