"""The control socket answers any line or closes the connection, and the job goes on."""

import asyncio
import json
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.ends import BOUND_S
from kit.garbage import DEEP, HARD, JSON, texts

from deadpool_run.coordinator.control import ControlServer
from deadpool_run.coordinator.requests import RequestHandler

DO = st.sampled_from(["status", "watch", "kill-rank", "stop", "dance"])
REQUESTS = st.fixed_dictionaries({"do": DO}, optional={"rank": JSON, "how": JSON, "every_s": JSON, "x": JSON})


class Job:
    """Answers as a leader does, and keeps what it was asked to do."""

    def __init__(self):
        self.submitted = []

    def status(self):
        return {"phase": "running"}

    def holder(self, rank):
        return (4, 4711) if rank == 0 else None

    def submit(self, event):
        self.submitted.append(event)


async def talk(lines, answer):
    """Send the lines; return what was answered, and the errors of the loop, each of which would end a job."""
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    with tempfile.TemporaryDirectory(prefix="control-", dir="/tmp") as folder:
        server = ControlServer(Path(folder), answer)
        await server.start()
        try:
            reader, writer = await asyncio.open_unix_connection(str(Path(folder) / "control.sock"))
            writer.write(b"".join(line + b"\n" for line in lines))
            writer.write_eof()
            answers = []
            with suppress(ConnectionError):  # it was closed before all lines were read
                answers = [json.loads(line) async for line in reader]
            writer.close()
            reader, writer = await asyncio.open_unix_connection(str(Path(folder) / "control.sock"))
            writer.write(b'{"do":"status"}\n')
            last = json.loads(await reader.readline())
            writer.close()
        finally:
            await server.close()
    return answers, last, failures


def run(lines, answer):
    return asyncio.run(asyncio.wait_for(talk(lines, answer), BOUND_S))


@settings(max_examples=60)
@given(st.lists(texts(REQUESTS | JSON).map(lambda line: line.replace(b"\n", b" ")), max_size=5))
@example([b"[" * DEEP])
@example([b'{"do":"status","x":' + b"[" * DEEP])
@example([b'{"do":"watch","every_s":NaN}'])
@example([b'{"do":"watch","every_s":1e999}'])
@example([b'{"do":"watch","every_s":' + b"9" * 400 + b"}"])
@example([b'{"do":"watch","every_s":true}'])
@example([b'{"do":"kill-rank","rank":' + b"9" * 400 + b"}"])
@example([b'{"do":"kill-rank","rank":0,"how":"\\ud800"}'])
@example([line for line in HARD if b"\n" not in line])
def test_whatever_comes_is_answered_and_ends_nothing(lines):
    async def answer(request):
        return await RequestHandler(2, Job()).encoded(request)

    answers, last, failures = run(lines, answer)
    assert last == {"phase": "running"}
    assert not failures
    assert all(isinstance(each, dict) for each in answers)


def test_an_answer_that_fails_ends_that_connection_only(caplog):
    async def answer(request):
        if request.get("x"):
            raise KeyError("a mistake of ours")
        return b'{"phase":"running"}'

    answers, last, failures = run([b'{"do":"status","x":1}', b'{"do":"status"}'], answer)
    assert (answers, last, failures) == ([], {"phase": "running"}, [])
    assert "a mistake of ours" in caplog.text
