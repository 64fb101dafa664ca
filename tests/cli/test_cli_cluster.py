"""Several machines on the command line: what is understood, what is refused, and the secret that they share."""

import os
import stat
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from deadpool_run.agent.authority.parse import AGENTS
from deadpool_run.cli.cluster.nodes import Shape, cluster, host_of, shape
from deadpool_run.cli.options import machine
from deadpool_run.cli.options.machine import existing_token, find_token, read_token
from deadpool_run.cli.options.resolve import resolve
from deadpool_run.errors import UsageError

TOKEN = b"secret"


def values(**given):
    return resolve(given, {}, {})


def clustered(**given):
    return cluster(values(**{"rdzv_endpoint": "h:1", **given}), 2, "here", lambda _: TOKEN)


@pytest.mark.parametrize(
    ("nnodes", "spares", "expected"),
    [
        ("1", "0", Shape(1, 0, 0)),
        ("1", "2", Shape(1, 0, 2)),
        ("1:1", "2w", Shape(1, 0, 2)),
        ("4", "0", Shape(4, 0, 0)),
        ("4", "1", Shape(3, 1, 0)),
        ("4", "2w", Shape(4, 0, 2)),
        ("4", "1n,2w", Shape(3, 1, 2)),
        ("4", "1, 1n , 2w", Shape(2, 2, 2)),
        ("4:4", "3", Shape(1, 3, 0)),
    ],
)
def test_machines_and_spares(nnodes, spares, expected):
    found = shape(values(nnodes=nnodes, spares=spares))
    assert found == expected
    assert found.machines == int(nnodes.partition(":")[0])


def test_alone_the_number_of_machines_is_not_looked_at():
    assert shape(values(nnodes="many", spares="2", standalone=True)) == Shape(1, 0, 2)


@pytest.mark.parametrize(
    ("given", "words", "advice"),
    [
        ({"nnodes": "0"}, "--nnodes '0'", "counts the spare ones"),
        ({"nnodes": "-1"}, "--nnodes '-1'", "counts the spare ones"),
        ({"nnodes": ""}, "--nnodes ''", "counts the spare ones"),
        ({"nnodes": "two"}, "--nnodes 'two'", "counts the spare ones"),
        ({"nnodes": "²"}, "--nnodes '²'", "counts the spare ones"),
        ({"nnodes": "2:x"}, "--nnodes '2:x'", "counts the spare ones"),
        ({"nnodes": "2:5"}, "--nnodes '2:5'", "--nnodes 5 --spares 3n"),
        ({"nnodes": "2", "spares": "2"}, "--spares '2'", "counts the spare machines too"),
        ({"nnodes": "2", "spares": "3n"}, "--spares '3n'", "counts the spare machines too"),
        ({"spares": "1n"}, "--spares '1n'", "spare workers are written 2w"),
        ({"spares": "-1"}, "--spares '-1'", "write 2, 2w"),
        ({"spares": "1x"}, "--spares '1x'", "write 2, 2w"),
        ({"spares": "w"}, "--spares 'w'", "write 2, 2w"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_advice(given, words, advice):
    with pytest.raises(UsageError) as caught:
        shape(values(**given))
    first, last = str(caught.value).splitlines()
    assert words in first
    assert advice in last


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("h", "h", ""),
        ("h:1", "h", "1"),
        ("10.0.0.1:29400", "10.0.0.1", "29400"),
        ("[fd00::1]:7", "fd00::1", "7"),
        ("[fd00::1]", "fd00::1", ""),
        ("fd00::1", "fd00::1", ""),
        (":7", "", "7"),
    ],
)
def test_hosts_and_ports(endpoint, host, port):
    assert host_of(endpoint) == (host, port)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rdzv_endpoint": "h"}, (("h", 29400),)),
        ({"rdzv_endpoint": "h:1,[::1]:2, g"}, (("h", 1), ("::1", 2), ("g", 29400))),
        ({"rdzv_endpoint": "h:1", "master_addr": "g"}, (("h", 1),)),
        ({"rdzv_endpoint": "", "master_addr": "g"}, (("g", 29500),)),
        ({"rdzv_endpoint": "", "master_addr": "g", "master_port": "7"}, (("g", 7),)),
    ],
)
def test_where_they_meet(given, expected):
    assert clustered(**given).endpoints == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rdzv_endpoint": ""}, "--rdzv-endpoint is not set"),
        ({"rdzv_endpoint": ":1"}, "no host in it"),
        ({"rdzv_endpoint": "h:0"}, "'0' is not a port"),
        ({"rdzv_endpoint": "h:65536"}, "'65536' is not a port"),
        ({"rdzv_endpoint": "h:http"}, "'http' is not a port"),
        ({"rdzv_endpoint": "h:²"}, "'²' is not a port"),
        ({"rdzv_endpoint": "[::1]x"}, "'x' is not a port"),
        ({"rdzv_endpoint": "", "master_addr": "g", "master_port": "x"}, "--master-port 'x'"),
        ({"node_rank": "-1"}, "--node-rank '-1'"),
        ({"replica_bandwidth": "fast"}, "--replica-bandwidth 'fast'"),
        ({"replica_bandwidth": "0"}, "--replica-bandwidth '0'"),
        ({"replica_bandwidth": "0.0001K"}, "--replica-bandwidth '0.0001K'"),
        ({"replica_bandwidth": "-1M"}, "--replica-bandwidth '-1M'"),
        ({"replica_streams": "0"}, "--replica-streams '0'"),
        ({"replica_streams": "17"}, "--replica-streams '17'"),
        ({"authority": "file:/d"}, "--authority 'file:/d': the run has no name"),
        ({"authority": "file:d", "run_id": "r"}, "--authority 'file:d': not an absolute path"),
        ({"authority": "zk://h", "run_id": "r"}, "--authority 'zk://h': not an authority"),
        ({"authority": "file:/e", "run_id": "r", "rdzv_endpoint": "/d"}, "--rdzv-endpoint names /d, which records"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_advice(given, words):
    with pytest.raises(UsageError) as caught:
        clustered(**given)
    lines = str(caught.value).splitlines()
    assert words in lines[0]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("text", "rate"),
    [("500", 500), ("500M", 500 * 10**6), ("1.5g", 1_500_000_000), ("2GiB/s", 2 * 10**9), ("1kB", 1000)],
)
def test_the_bandwidth_of_copies(text, rate):
    assert clustered(replica_bandwidth=text).bandwidth == rate


def test_the_connections_of_a_snapshot():
    assert clustered().streams is None
    assert clustered(replica_streams="16").streams == 16


def test_what_a_node_is_among_the_others():
    found = clustered(node_rank="3", topology="leaf1", node_name="gpu7", run_dir="there")
    assert (found.node_rank, found.failure_domain, found.node_name) == (3, "leaf1", "gpu7")
    assert found.own_directory
    plain = clustered()
    assert (plain.node_rank, plain.failure_domain, plain.node_name, plain.bandwidth) == (None, "", "here", None)
    assert not plain.own_directory
    assert plain.token == TOKEN
    assert TOKEN.decode() not in repr(plain)


@pytest.mark.parametrize(
    ("given", "authority", "name"),
    [
        ({}, "agents", None),
        ({"authority": "agents", "run_id": "r"}, "agents", None),
        ({"authority": "file:/d", "run_id": "r"}, "file:/d", "r"),
        ({"authority": "file:/d", "rdzv_id": "z"}, "file:/d", "z"),
        ({"rdzv_endpoint": "/d"}, "file:/d", "run"),
        ({"rdzv_endpoint": "/d", "authority": "file:/d", "run_id": "r"}, "file:/d", "r"),
        ({"authority": "etcd://h:1,g:2", "run_id": "r"}, "etcd://h:1,g:2/deadpool-run", "r"),
    ],
)
def test_what_decides_between_machines(given, authority, name):
    found = clustered(**given)
    assert (AGENTS if found.authority is None else found.authority.where) == authority
    assert (found.authority and found.authority.run_id) == name


def test_with_an_authority_no_address_is_needed():
    assert clustered(rdzv_endpoint="", authority="file:/d", run_id="r").endpoints == ()
    assert clustered(rdzv_endpoint="h", authority="file:/d", run_id="r").endpoints == (("h", 29400),)
    assert clustered(rdzv_endpoint="/d").meeting == Path("/d")
    assert clustered(rdzv_endpoint="", authority="file:/d", run_id="r").meeting is None


def test_one_machine_is_no_cluster():
    def token(_):
        raise AssertionError("the token was read")

    assert cluster(values(), 1, "here", token) is None


# --- the token ------------------------------------------------------------------------------------------------------


def state(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def token_file(tmp_path, content, mode=0o600):
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_goes_before_the_environment_and_that_before_the_users_own(tmp_path):
    token_file(tmp_path, b" the secret of the file\n")
    environment = {**state(tmp_path), "DEADPOOL_TOKEN": "of the environment"}
    assert find_token(str(tmp_path / "file"), environment) == b"the secret of the file"
    assert find_token("", environment) == b"of the environment"
    assert not (tmp_path / "state").exists()
    own = find_token("", state(tmp_path))
    assert len(own) >= 32
    assert find_token("", state(tmp_path)) == own
    assert existing_token(str(tmp_path / "file")) == b"the secret of the file"
    assert existing_token("") == b""


def test_the_users_own_is_for_his_eyes_and_nothing_is_left_beside_it(tmp_path):
    find_token("", state(tmp_path))
    (path,) = (tmp_path / "state" / "deadpool-run").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_all_who_make_it_at_once_have_the_same(tmp_path):
    found, gate = [], threading.Barrier(16)

    def find():
        gate.wait(10)
        found.append(find_token("", state(tmp_path)))

    threads = [threading.Thread(target=find) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 16
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "state" / "deadpool-run").iterdir()] == ["token"]


def test_a_token_that_is_none_is_refused_with_advice(tmp_path):
    (tmp_path / "state").write_text("a file where a directory should be")
    with pytest.raises(UsageError, match="No such file") as caught:
        read_token(tmp_path / "nowhere")
    assert "--token-file" in str(caught.value).splitlines()[-1]
    with pytest.raises(UsageError, match="DEADPOOL_TOKEN"):
        find_token("", state(tmp_path))
    with pytest.raises(UsageError, match="nowhere"):
        existing_token(str(Path(tmp_path / "nowhere")))


@pytest.mark.parametrize("content", [b"", b"\n", b"secret", b" 15 bytes of it.\n"])
def test_a_token_that_can_be_guessed_is_refused_with_what_to_write(tmp_path, content):
    path = token_file(tmp_path, content)
    with pytest.raises(UsageError, match=rf"has {len(content.strip())} bytes: at least 16") as caught:
        read_token(path)
    assert f"openssl rand -hex 32 > {path}" in str(caught.value).splitlines()[-1]
    if content.strip():
        with pytest.raises(UsageError, match=r"DEADPOOL_TOKEN has \d+ bytes: at least 16") as caught:
            find_token("", state(tmp_path) | {"DEADPOOL_TOKEN": content.decode().strip()})
        assert "export DEADPOOL_TOKEN=$(openssl rand -hex 32)" in str(caught.value)


def test_a_token_of_sixteen_bytes_is_enough(tmp_path):
    assert read_token(token_file(tmp_path, b"0123456789abcdef\n")) == b"0123456789abcdef"
    assert find_token("", {"DEADPOOL_TOKEN": "0123456789abcdef"}) == b"0123456789abcdef"


def test_a_file_without_an_end_is_not_read_to_it():
    with pytest.raises(UsageError, match="larger than 4096 bytes"):
        read_token(Path("/dev/zero"))


SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = token_file(tmp_path, SECRET, mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}") as caught:
        read_token(path)
    assert str(caught.value).splitlines()[-1] == f"run: chmod 600 {path}"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_file_that_is_the_users_alone_is_read(tmp_path, mode):
    assert read_token(token_file(tmp_path, SECRET, mode)) == SECRET


as_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to other users")


@as_root
def test_a_file_of_another_user_is_refused(tmp_path):
    path = token_file(tmp_path, SECRET)
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match="owned by user 12345"):
        read_token(path)


@as_root
@pytest.mark.parametrize(("mode", "ok"), [(0o640, True), (0o440, True), (0o644, False), (0o660, False)])
def test_a_file_of_root_may_be_read_by_the_group_that_root_gave_it(tmp_path, mode, ok):
    """As the files of a Kubernetes secret are, with `fsGroup` and `defaultMode: 0440`."""
    path = token_file(tmp_path, SECRET, mode)
    os.chown(path, 0, 12345)
    with nullcontext() if ok else pytest.raises(UsageError, match=f"mode {mode:04o}"):
        machine.check_private(path.stat(), path, 12345)
