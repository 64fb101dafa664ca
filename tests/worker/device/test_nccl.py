"""Tests of NCCL without a device: settings and errors, and the classes, signatures and options of torch's CUDA build."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch.distributed import _symmetric_memory

from deadpool_run.errors import Blame, ScriptError
from deadpool_run.vault.status_page import DeviceLibrary
from deadpool_run.view.collectives import expected
from deadpool_run.worker.compat import nccl as compat
from deadpool_run.worker.device import choose
from deadpool_run.worker.device.backend import GroupSpec
from deadpool_run.worker.device.nccl import SETTINGS, Nccl
from deadpool_run.worker.process.blame import blame
from deadpool_run.worker.snapshot import slot_memory

in_the_cuda_build = pytest.mark.skipif(
    not dist.is_nccl_available(), reason="needs torch's CUDA build: make test-cuda-wheel"
)
with_nccl2 = pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="needs the CUDA build of torch 2.15")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")

LOST = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.30.7",
    "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL communicator was aborted on rank 3.",
    "NCCL commInitRankConfig failed during reconfigure timed out after 30000 ms",
)
OF_A_WAIT = ("NCCL operation failed", "Watchdog caught collective operation timeout: NCCL operation timed out")
"""Errors of `wait` of `ProcessGroupNCCL2` after a revoke, or when its watchdog has found an error. They name no cause."""
THE_SCRIPTS = (
    "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.30.7",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error in: NCCLUtils.cpp:77, invalid argument (run with NCCL_DEBUG=WARN for details), NCCL version 2.30.7",
    "Tensors must be contiguous",
)


@pytest.fixture
def environment():
    before = dict(os.environ)
    functions = {name: getattr(_symmetric_memory, name) for name in compat.SYMMETRIC}
    yield
    os.environ.clear()
    os.environ.update(before)
    for name, function in functions.items():
        setattr(_symmetric_memory, name, function)


@pytest.mark.parametrize(
    ("text", "is_lost"), [(text, True) for text in LOST + OF_A_WAIT] + [(text, False) for text in THE_SCRIPTS]
)
def test_only_errors_of_peers_and_network_count_as_a_loss(text, is_lost):
    assert Nccl().is_peer_failure(dist.DistBackendError(text)) is is_lost


def test_the_debug_level_that_ends_processes_is_refused(environment):
    level = native.get_debug_level()
    native.set_debug_level(native.DebugLevel.DETAIL)
    try:
        with pytest.raises(ScriptError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
            Nccl().configure()
    finally:
        native.set_debug_level(level)


def test_settings_reach_the_environment_and_symmetric_memory_is_refused(environment):
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # by torchrun, and by our agent
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    with pytest.warns(RuntimeWarning, match=r"sets TORCH_NCCL_BLOCKING_WAIT=0 \(it was 1\): "):
        Nccl().configure()
    assert SETTINGS.items() <= os.environ.items()
    for name in compat.SYMMETRIC:
        with pytest.raises(ScriptError, match="symmetric memory"):
            getattr(_symmetric_memory, name)("0")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Nccl().configure()


@pytest.mark.parametrize("name", ["ProcessGroupNCCL", "ProcessGroupNCCL2"])
def test_a_backend_allocates_no_memory_that_it_registers(environment, monkeypatch, name):
    """FSDP2 can ask the backend for the memory of its collectives. It allocates as usual if the backend cannot."""

    class Backend:
        def supports_tensor_alloc(self, _device):
            return True

        def allocate_tensor(self):
            return "registered"

        register_mem_pool = allocate_tensor

    monkeypatch.setattr(dist, name, Backend, raising=False)
    Nccl().configure()
    assert not Backend().supports_tensor_alloc(torch.device("cuda"))
    for refused in (Backend().allocate_tensor, Backend().register_mem_pool):
        with pytest.raises(ScriptError, match="symmetric memory"):
            refused()


@in_the_cuda_build
def test_the_library_has_the_functions_that_allocate():
    for name in ("supports_tensor_alloc", "allocate_tensor", "register_mem_pool"):
        assert callable(getattr(dist.ProcessGroupNCCL, name))


def test_connecting_may_take_longer_in_a_large_world(environment, monkeypatch):
    library = Nccl()
    library.configure()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(library, "_make", lambda *_: None)
    monkeypatch.setattr(library, "_options", lambda _: None)
    for size, limit_s in ((8, "30"), (512, "62"), (8, "62")):  # torch reads it after the last
        library.create(None, GroupSpec("0", 0, tuple(range(size)), timedelta(seconds=70)), torch.device("cuda"))
        assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == limit_s


def spec(options=None):
    return GroupSpec("g", 1, (4, 7, 9), timedelta(seconds=70), options=options)


@in_the_cuda_build
def test_options_are_the_scripts_but_for_what_we_set():
    user = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    user.config.max_ctas = 8
    user.config.cga_cluster_size = 2
    made = Nccl()._options(spec(user))
    assert made is not user
    assert (made.is_high_priority_stream, made.config.max_ctas, made.config.cga_cluster_size) == (True, 8, 2)
    assert (made._timeout, made.group_name) == (timedelta(seconds=70), "g")
    assert list(made.global_ranks_in_group) == [4, 7, 9]
    assert Nccl()._options(spec()).is_high_priority_stream is False


@in_the_cuda_build
@without_a_gpu
def test_the_legacy_class_takes_our_arguments_and_looks_for_a_gpu():
    made = Nccl()._options(spec())
    with pytest.raises(ValueError, match="no GPUs found"):
        compat.legacy(dist.HashStore(), 1, 3, made)
    assert made.config.blocking == 0


def library(name):
    """Load a library of NVIDIA's that the CUDA build of torch brings with it."""
    (path,) = (path for path in Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}.so*"))
    return path, ctypes.CDLL(str(path))


@in_the_cuda_build
def test_nccls_own_texts_say_whose_an_error_is():
    """ncclSystemError and ncclRemoteError; not those of CUDA, of the library, of arguments, and of usage."""
    _, nccl = library("libnccl")
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    texts = {code: nccl.ncclGetErrorString(code).decode() for code in range(1, 7)}
    lost = {code for code, text in texts.items() if Nccl().is_peer_failure(dist.DistBackendError(text))}
    assert lost == {2, 6}, texts
    assert texts[6] in LOST[0]
    assert texts[2] in LOST[1]
    assert texts[5] in THE_SCRIPTS[0]
    assert texts[1] in THE_SCRIPTS[1]
    assert texts[4] in THE_SCRIPTS[3]


@in_the_cuda_build
@pytest.mark.parametrize(
    ("code", "is_device"), [(46, True), (214, True), (220, True), (2, False), (700, False), (719, False)]
)
def test_cudas_own_texts_say_whether_a_gpu_failed(code, is_device):
    """Of cudaErrorDevicesUnavailable, ...ECCUncorrectable and ...NvlinkUncorrectable; out of memory, and a kernel's errors."""
    _, cuda = library("libcudart")
    cuda.cudaGetErrorString.restype = ctypes.c_char_p
    text = f"CUDA error: {cuda.cudaGetErrorString(code).decode()}"
    assert (blame(RuntimeError(text)) is Blame.DEVICE) is is_device, text


TORCH_CUDA = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"


def has(path, text):
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode() + b"\0") >= 0


@in_the_cuda_build
def test_torch_and_nccl_read_every_setting():
    nccl, _ = library("libnccl")
    for name in SETTINGS:
        path = nccl if name.startswith("NCCL_") else TORCH_CUDA
        assert has(path, name), f"{path.name} does not know {name}"


@in_the_cuda_build
def test_the_error_of_cudas_last_call_can_be_cleared():
    assert slot_memory._LIBC.cudaGetLastError


@with_nccl2
def test_torch_has_the_texts_of_a_wait_that_fails():
    assert all(has(TORCH_CUDA, text) for text in OF_A_WAIT)


@in_the_cuda_build
@pytest.mark.parametrize(
    "name", ["abort", "shutdown", "get_error", "eager_connect_single_device", "_start_coalescing", "_end_coalescing"]
)
def test_the_legacy_class_has_what_we_call(name):
    assert callable(getattr(dist.ProcessGroupNCCL, name))


WITHOUT_A_DRIVER = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from deadpool_run.worker.compat import c10d, nccl
from deadpool_run.worker.device.backend import GroupSpec
from deadpool_run.worker.device.nccl import Nccl2

def refusal(handles):
    try:
        nccl.reconfigure(made, handles, timedelta(seconds=5))
    except Exception as error:
        return str(error).partition("\\n")[0]

def without_gloo():
    try:
        bare._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        return str(error).partition("\\n")[0]

spec = GroupSpec("g", 1, (0, 1), timedelta(seconds=5))
made = nccl.reconfigurable(dist.HashStore(), 1, 2, Nccl2()._options(spec))
bare = c10d.bare_group(dist.HashStore(), 1, 2)
assert Nccl2().bind(bare, made) is bare
mine = made.get_reconfigure_handle()
print(json.dumps({
    "reconfigures": [made.options.enable_reconfigure, made.supports_reconfigure],
    "handle": mine,
    "error": nccl.error_of(made),
    "not a member": refusal(["nccl2:0:-1:1:"]),
    "twice": refusal([mine, mine]),
    "no peer": refusal(["nccl2:0:-1:1:", mine]),
    "binds": [bare._get_backend(torch.device("cuda")) is made, without_gloo()],
    "calls": [name for name in ("abort", "shutdown", "get_error", "_start_coalescing") if callable(getattr(made, name))],
}))
sys.stdout.flush()
os._exit(0)  # without a driver, its destructor ends the process
"""


@with_nccl2
@without_a_gpu
def test_the_reconfigurable_class_is_made_without_a_gpu_and_looks_for_its_peers():
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_DRIVER], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["reconfigures"] == [True, True]
    kind, rank, uuid, instance, _ = told["handle"].split(":")
    assert (kind, rank, uuid) == ("nccl2", "1", "-1")
    assert instance
    assert told["error"] == ""
    assert "not part of the new communicator" in told["not a member"]
    assert "must be unique" in told["twice"]
    assert "timeout" in told["no peer"].lower()  # rank 0 has put no unique id into the store: the deadline holds
    assert told["binds"][0] is True
    assert "No backend type associated with device type cpu" in told["binds"][1]
    assert len(told["calls"]) == 4


@in_the_cuda_build
def test_the_reconfigurable_class_is_the_one_that_torch_itself_would_use(monkeypatch):
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    assert compat.has_reconfigurable() is hasattr(dist, "ProcessGroupNCCL2")
    assert expected(torch.__version__, 1, os.environ).name.lower() == (
        "nccl2" if compat.has_reconfigurable() else "nccl"
    )
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert not compat.has_reconfigurable()
    assert expected(torch.__version__, 1, os.environ) is DeviceLibrary.NCCL


@without_a_gpu
def test_without_a_gpu_there_is_no_device():
    assert choose.device_backend() is None
