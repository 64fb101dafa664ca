"""From values to what is started, and what is refused."""

import os
import signal
from pathlib import Path

import pytest

from deadpool_run.agent.numa import BindingMode
from deadpool_run.agent.spec import DEFAULT_PRELOAD, LOGS_OFF, Mode, StartMethod, Streams
from deadpool_run.cli.cluster.spec_builder import directory_name, plan, split_needles
from deadpool_run.cli.options.machine import Surroundings, count_gpus, look_around, state_dir
from deadpool_run.cli.options.resolve import resolve
from deadpool_run.errors import UsageError

PYTHON = "/usr/bin/python3"


def planned(argv=("train.py",), environment=None, gpus=0, plugins=lambda _: frozenset(), bind=None, **given):
    environment = environment or {}
    here = Surroundings(
        environment=environment,
        cpus=6,
        gpus=gpus,
        host_names=frozenset({"localhost", "node7", "node7.cluster", "10.0.0.7", "::1"}),
        state_dir=Path("/state"),
        fresh_run_id="fresh",
        plugins=plugins,
        **({"bind": bind} if bind else {}),
    )
    return plan(resolve(given, environment, {}), tuple(argv), here)


@pytest.fixture(autouse=True)
def _this_interpreter(monkeypatch):
    monkeypatch.setattr("sys.executable", PYTHON)


def test_the_cpus_are_those_that_may_be_used():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert look_around({}).cpus == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_defaults_are_torchruns():
    spec = planned().spec
    assert (spec.nproc_per_node, spec.settings.world_size, spec.settings.spares) == (1, 1, 0)
    assert (spec.role, spec.redirects, spec.tee, spec.local_ranks_filter) == ("default", {}, {}, None)
    assert spec.settings.shutdown_timeout_s == 30
    assert spec.settings.max_restarts is None
    assert spec.run_dir == Path("/state/fresh")
    assert spec.target.mode is Mode.PATH
    assert spec.signals_to_handle == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert planned().notes == ()


@pytest.mark.parametrize(
    ("text", "gpus", "ranks"), [("4", 0, 4), ("cpu", 2, 6), ("auto", 2, 2), ("auto", 0, 6), ("gpu", 3, 3)]
)
def test_ranks_are_counted_as_torchrun_counts_them(text, gpus, ranks):
    assert planned(nproc_per_node=text, gpus=gpus).spec.nproc_per_node == ranks


@pytest.mark.parametrize(("ranks", "gpus", "devices"), [("4", 8, 8), ("4", 4, 4), ("4", 2, 0), ("4", 0, 0)])
def test_gpus_count_if_there_is_one_for_each_rank(ranks, gpus, devices):
    assert planned(nproc_per_node=ranks, gpus=gpus).spec.devices == devices


def test_spares_that_cannot_rehearse_for_lack_of_a_gpu_are_noted():
    def notes(ranks, **given):
        return " ".join(planned(nproc_per_node=ranks, gpus=4, **{"spares": "1", "spare_mode": "hot", **given}).notes)

    assert "with --nproc-per-node 3, one GPU is free for a spare" in notes("4")
    assert "rehearse" not in notes("3") + notes("8") + notes("4", spare_mode="warm") + notes("4", spares="0")


@pytest.mark.parametrize(
    ("given", "mode", "argv"),
    [
        ({}, Mode.PATH, ("train.py", "-x")),
        ({"module": True}, Mode.MODULE, ("train.py", "-x")),
        ({"no_python": True}, Mode.EXEC, ("train.py", "-x")),
        ({"run_path": True, "no_python": True}, Mode.PATH, (str(Path.cwd() / "train.py"), "-x")),
    ],
)
def test_the_target(given, mode, argv):
    target = planned(("train.py", "-x"), **given).spec.target
    assert (target.mode, target.argv) == (mode, argv)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("redirects", "0", {}),
        ("redirects", "3", {0: Streams.BOTH, 1: Streams.BOTH}),
        ("tee", "0:1,1:2", {0: Streams.OUT, 1: Streams.ERR}),
        ("tee", "1:2,0:0", {1: Streams.ERR}),
    ],
)
def test_streams(name, text, expected):
    assert getattr(planned(nproc_per_node="2", **{name: text}).spec, name) == expected


@pytest.mark.parametrize(("given", "seconds"), [({}, 600), ({"hang_timeout": "0"}, 0), ({"hang_timeout": "2.5"}, 2.5)])
def test_hangs_are_looked_for_unless_switched_off(given, seconds):
    assert planned(**given).spec.hang_timeout_s == seconds


def test_streams_of_ranks_with_two_digits():
    assert planned(nproc_per_node="12", redirects="11:3").spec.redirects == {11: Streams.BOTH}


def test_what_else_is_passed_on():
    spec = planned(
        nproc_per_node="3",
        spares="2",
        max_restarts="5",
        local_ranks_filter="0, 2",
        signals_to_handle="SIGTERM,USR1",
        log_dir="/dev/null",
        preload="numpy,torch",
        duplicate_stdout_filters="loss,,acc,step",
        capture_interval="50",
        virtual_local_rank=True,
    ).spec
    assert (spec.settings.spares, spec.settings.max_restarts) == (2, 5)
    assert spec.local_ranks_filter == {0, 2}
    assert spec.signals_to_handle == (signal.SIGTERM, signal.SIGUSR1)
    assert spec.log_dir == LOGS_OFF
    assert spec.preload == (*DEFAULT_PRELOAD, "numpy")
    assert spec.duplicate_stdout_filters == ("loss,acc", "step")
    assert (spec.settings.capture_interval, spec.settings.max_capture_interval) == (50, 50)
    assert spec.virtual_local_rank


def test_all_nodes_have_the_node_timeout_of_the_job():
    assert planned(node_timeout="0.5").spec.settings.node_timeout_s == 0.5


def test_the_runs_name_and_place():
    assert planned(rdzv_id="job/7").spec.run_id == "job/7"
    assert planned(rdzv_id="job/7").spec.run_dir == Path("/state/job-7-fresh")
    assert planned(rdzv_id="job/7", standalone=True).spec.run_id == "fresh"
    assert planned(rdzv_id="j" * 200).spec.run_dir.name == "j" * 94 + "-fresh"
    assert planned(run_id="mine", rdzv_id="job").spec.run_id == "mine"
    assert planned(run_id="mine", rdzv_id="job").spec.run_dir == Path("/state/mine")
    assert planned(run_dir="there").spec.run_dir == Path.cwd() / "there"


def test_old_runs_are_removed_from_the_default_place_only():
    assert planned().spec.keep_runs is None
    assert planned(keep_runs="0").spec.keep_runs == 0
    assert planned(keep_runs="20", run_dir="there").spec.keep_runs is None
    with pytest.raises(UsageError, match="--keep-runs '-1': too small"):
        planned(keep_runs="-1")


@pytest.mark.parametrize("name", ["..", "/", "...a..", "a/../../b", "x" * 300, "-", "ö"])
def test_a_runs_directory_stays_below_its_parent(name):
    directory = directory_name(name)
    assert Path(directory).name == directory
    assert directory not in {"", ".", ".."}
    assert len(directory) <= 100


def test_another_interpreter_bypasses_the_forkserver():
    spec = planned(environment={"PYTHON_EXEC": "/opt/python"}).spec
    assert (spec.start_method, spec.python) == (StartMethod.SPAWN, "/opt/python")
    with pytest.raises(UsageError, match="spawn"):
        planned(environment={"PYTHON_EXEC": "/opt/python"}, start_method="forkserver")


def test_the_shutdown_timeout_of_torch_counts_where_none_is_given():
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert planned(environment=environment).spec.settings.shutdown_timeout_s == 7
    assert planned(environment=environment, shutdown_timeout="9").spec.settings.shutdown_timeout_s == 9
    for bad in ("soon", "-1", "0", "nan"):
        with pytest.raises(UsageError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
            planned(environment={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": bad})


def test_the_join_timeout_of_torchruns_rendezvous_counts_where_none_is_given():
    given = {"nnodes": "3", "rdzv_endpoint": "node7:1", "rdzv_conf": "join_timeout=60, read_timeout=5"}
    assert planned(**given).spec.settings.join_timeout_s == 60
    assert planned(**given).notes == ("no effect: --rdzv-conf",)
    assert planned(**given, join_timeout="7").spec.settings.join_timeout_s == 7
    assert planned(**{**given, "rdzv_conf": "join_timeout=60"}).notes == ()


def test_plugins_of_torchrun_are_known_by_name():
    plugins = {"torchrun.logs_specs": {"mine"}, "torchrun.handlers": {"ours"}}
    launch = planned(logs_specs="mine", rdzv_backend="ours", plugins=lambda group: frozenset(plugins[group]))
    assert launch.notes == ("no effect on one machine: --rdzv-backend, --logs-specs",)


def test_ranks_are_bound_to_cpus():
    asked = []

    def bind(mode, ranks):
        asked.append((mode, ranks))
        return {0: frozenset({3})}

    assert planned(nproc_per_node="2", numa_binding="core-complex", bind=bind).spec.cpus == {0: {3}}
    assert planned(bind=bind).spec.cpus == {}
    assert asked == [(BindingMode.CORE_COMPLEX, 2)]


def test_what_means_nothing_here_is_said_once():
    launch = planned(rdzv_backend="c10d", local_addr="node7", master_port="29500", start_method="fork")
    assert launch.spec.start_method is StartMethod.FORKSERVER
    assert launch.notes == (
        "no effect on one machine: --rdzv-backend, --master-port, --local-addr",
        "--start-method fork: workers are forked from the fork server",
    )
    assert planned(event_log_handler="console", use_env=True).notes == (
        "no effect on one machine: --event-log-handler",
    )
    assert planned(nproc_per_node="2", redirects="0:1,5:3", tee="3", local_ranks_filter="1,2,7").notes == (
        "--redirects 0:1,5:3: there is no local rank 5",
        "--local-ranks-filter 1,2,7: there is no local rank 2, 7",
    )
    assert planned(standalone=True, rdzv_backend="c10d", rdzv_endpoint="elsewhere:1").notes == ()
    several = {"nnodes": "2", "rdzv_endpoint": "node7:1", "rdzv_id": "job", "rdzv_backend": "c10d"}
    assert planned(**several).notes[0] == "no effect: --rdzv-backend"


TWO = {"nnodes": "2", "rdzv_endpoint": "node7:1"}


@pytest.mark.parametrize(
    ("given", "survives"),
    [
        ({}, "replaced on its machine"),
        ({"spares": "2w"}, "the other continues"),
        ({"spares": "1n"}, "the other continues"),
    ],
)
def test_a_job_on_two_machines_says_what_it_survives_and_what_not(given, survives):
    (note,) = planned(**TWO, **given).notes
    assert survives in note
    assert "power or its link, both stop" in note
    assert "--spares 1n" in note


def test_other_jobs_say_nothing_of_two_machines(tmp_path):
    authority = {"authority": f"file:{tmp_path}", "run_id": "job", "spares": "1n"}
    for given in (
        {**TWO, "nnodes": "3"},
        {**TWO, "nnodes": "3", "spares": "1n"},
        {**TWO, **authority},
        {"spares": "1"},
    ):
        assert planned(**given).notes == ()


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:0", "127.0.0.1", "node7", "node7:29400", "node7.cluster:1", "10.0.0.7:29400", "[::1]:29400", "::1"],
)
def test_an_endpoint_on_this_machine_is_accepted(endpoint):
    planned(rdzv_endpoint=endpoint)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nnodes": "2"}, "--nnodes asks for several machines, but --rdzv-endpoint is not set"),
        ({"nnodes": "1:4"}, "--nnodes '1:4'"),
        ({"rdzv_endpoint": "node8:29400"}, "--rdzv-endpoint 'node8:29400'"),
        ({"node_rank": "1"}, "--node-rank '1'"),
        ({"logs_specs": "mine"}, "--logs-specs 'mine'"),
        ({"event_log_handler": "nope"}, "--event-log-handler 'nope'"),
        ({"logs_specs": "mine"}, "no such plugin is installed"),
        ({"numa_binding": "near"}, "--numa-binding 'near'"),
        ({"rdzv_backend": "nope"}, "--rdzv-backend 'nope'"),
        ({"rdzv_conf": "timeout"}, "'timeout' is not a setting"),
        ({"rdzv_conf": "a=1,join_timeout=soon"}, "join_timeout=soon is not a positive duration"),
        ({"monitor_interval": "often"}, "--monitor-interval 'often'"),
        ({"nproc_per_node": "0"}, "--nproc-per-node '0'"),
        ({"nproc_per_node": "-2"}, "--nproc-per-node '-2'"),
        ({"nproc_per_node": "xpu"}, "--nproc-per-node 'xpu'"),
        ({"nproc_per_node": "gpu"}, "no GPU found"),
        ({"module": True, "no_python": True}, "exclude each other"),
        ({"redirects": "4"}, "--redirects '4'"),
        ({"tee": "0:3,"}, "--tee '0:3,'"),
        ({"local_ranks_filter": "a"}, "not a list of local ranks"),
        ({"local_ranks_filter": "²"}, "not a list of local ranks"),
        ({"signals_to_handle": "SIGTERM,SIGKILL"}, "SIGKILL cannot be handled"),
        ({"signals_to_handle": "NOPE"}, "NOPE cannot be handled"),
        ({"start_method": "thread"}, "--start-method 'thread'"),
        ({"capture_interval": "0"}, "--capture-interval '0'"),
        ({"snapshot_memory": "much"}, "--snapshot-memory 'much': not a size with a unit"),
        ({"snapshot_memory": "8"}, "--snapshot-memory '8': not a size with a unit"),
        ({"snapshot_memory": "-1G"}, "--snapshot-memory '-1G': not a size with a unit"),
        ({"snapshot_memory": "0GiB"}, "--snapshot-memory '0GiB': too small"),
        ({"node_timeout": "0"}, "--node-timeout '0'"),
        ({"max_restarts": "-1"}, "--max-restarts '-1'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_advice(given, words):
    with pytest.raises(UsageError) as caught:
        planned(**given)
    assert words in str(caught.value).splitlines()[0]
    assert len(str(caught.value).splitlines()) == 2
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("", 0),
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("1.5 T", 3 << 39),
        ("500MB", 500 * 10**6),
        ("2kB", 2000),
        ("1KiB", 1024),
    ],
)
def test_the_memory_for_snapshots(text, nbytes):
    assert planned(snapshot_memory=text).spec.snapshot_memory == nbytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("", None), ("7B", 7 * 10**9), ("1.5t", 1_500 * 10**9), ("350M", 350 * 10**6), ("2k", 2000), ("12", 12)],
)
def test_the_number_of_parameters(text, count):
    assert resolve({"simulate_parameters": text or None}, {}, {}).quantity("simulate_parameters", "7B") == count


@pytest.mark.parametrize("text", ["many", "0", "-1B", "7 GB", "0.1"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(UsageError, match=f"--simulate-parameters '{text}': not a number from 1") as caught:
        resolve({"simulate_parameters": text}, {}, {}).quantity("simulate_parameters", "7B")
    assert len(str(caught.value).splitlines()) == 2


def test_needles():
    assert split_needles("") == ()
    assert split_needles("a,b") == ("a", "b")
    assert split_needles(",,") == (",",)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("", 0), ("0,1", 2), ("2", 1), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3,4", 3), ("GPU-1, GPU-2", 2)],
)
def test_gpus_are_counted_by_their_device_nodes(tmp_path, visible, expected):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, tmp_path) == expected


def test_where_state_goes():
    assert state_dir({"XDG_STATE_HOME": "/var/s"}) == Path("/var/s/deadpool-run")
    assert state_dir({"XDG_STATE_HOME": "relative", "HOME": "/home/u"}) == Path("/home/u/.local/state/deadpool-run")
