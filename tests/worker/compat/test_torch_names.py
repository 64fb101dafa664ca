"""Names that we use of torch without its promise, looked up in torch's files of every supported version.

The installed torch is looked at always, the others where `make test-torch-api` has fetched their files.
"""

import ast
import re
import tomllib
from dataclasses import dataclass
from operator import attrgetter

import pytest
import torch_files
from torch._C import _distributed_c10d as native

from deadpool_run.agent.spec import DEFAULT_PRELOAD
from deadpool_run.worker.groups import group

PACKAGE = torch_files.ROOT / "deadpool_run"
COMPAT = sorted((PACKAGE / "worker" / "compat").glob("*.py"))
STUB = "torch/_C/_distributed_c10d.pyi"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})

VERSIONS = [torch_files.installed(), *torch_files.kept()]


@dataclass(frozen=True)
class Place:
    """Where torch defines a name: in a file, in a class of it if `owner`; of `file` None in C++ only, bound to `owner`."""

    file: str | None
    owner: str = ""
    since: tuple[int, int] = (2, 13)


C10D = Place("torch/distributed/distributed_c10d.py")
MODULE_HOOKS = Place("torch/nn/modules/module.py")
OPTIMIZER_HOOKS = Place("torch/optim/optimizer.py")
SCALER = Place("torch/amp/grad_scaler.py", "GradScaler")


def _bound(owner):
    return Place(None, owner)


def _stub(owner, since=(2, 13)):
    return Place(STUB, owner, since)


def _file(path):
    """A module: the name is the file's own."""
    return Place(path, "<file>")


FSDP = "torch/distributed/fsdp/_fully_shard/"
NAMES = {
    "_C": [_file("torch/_C/__init__.pyi")],
    "_Options": [_bound("ProcessGroupGloo")],
    "_StorageInfo": [Place("torch/distributed/checkpoint/filesystem.py")],
    "_StridedShard": [Place("torch/distributed/tensor/placement_types.py")],
    "_spec": [Place("torch/distributed/tensor/_api.py", "DTensor")],
    "_add_ephemeral_timeout": [_stub("ProcessGroup", (2, 14))],
    "_base": [Place("torch/_C/__init__.pyi", "TensorBase")],
    "_all_gather_comm": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "_all_reduce_hook": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "_auto_reshard_after_forward": [Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_backward_hooks": [Place("torch/_C/__init__.pyi", "TensorBase")],
    "_post_accumulate_grad_hooks": [Place("torch/_tensor.py", "Tensor")],
    "_buffers": [Place("torch/nn/modules/module.py", "Module")],
    "_check_p2p_op_list": [C10D],
    "_clear_DTensor_sharding_propagator_cache": [Place("torch/_C/__init__.pyi")],
    "_coalescing_manager": [C10D],
    "_num_yielded": [Place("torch/utils/data/dataloader.py", "_BaseDataLoaderIter")],
    "_comm_hooks": [Place("torch/nn/parallel/distributed.py", "DistributedDataParallel")],
    "_pre_forward": [Place("torch/nn/parallel/distributed.py", "DistributedDataParallel")],
    "_compute_local_shape_and_global_offset": [Place("torch/distributed/tensor/_utils.py")],
    "_create_internal": [_stub("FakeProcessGroup")],
    "_current_graph_task_id": [Place("torch/_C/__init__.pyi")],
    "_devices": [_bound("ProcessGroupGloo._Options")],
    "_distributed_c10d": [_file(STUB)],
    "_dynamo": [_file("torch/_dynamo/__init__.py")],
    "_end_coalescing": [_stub("ProcessGroup")],
    "_foreach_copy_": [Place("torch/_C/_VariableFunctions.pyi")],
    "_fsdp_param_groups": [Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_fsspec_filesystem": [_file("torch/distributed/checkpoint/_fsspec_filesystem.py")],
    "_get_backend": [_stub("ProcessGroup")],
    "_get_fsdp_state": [Place(f"{FSDP}_fully_shard.py", "FSDPModule")],
    "_global_backward_hooks": [MODULE_HOOKS],
    "_global_backward_pre_hooks": [MODULE_HOOKS],
    "_global_buffer_registration_hooks": [MODULE_HOOKS],
    "_global_forward_hooks": [MODULE_HOOKS],
    "_global_forward_hooks_always_called": [MODULE_HOOKS],
    "_global_forward_hooks_with_kwargs": [MODULE_HOOKS],
    "_global_forward_pre_hooks": [MODULE_HOOKS],
    "_global_module_registration_hooks": [MODULE_HOOKS],
    "_global_optimizer_post_hooks": [OPTIMIZER_HOOKS],
    "_global_optimizer_pre_hooks": [OPTIMIZER_HOOKS],
    "_global_parameter_registration_hooks": [MODULE_HOOKS],
    "_growth_tracker": [SCALER],
    "_has_rebuilt_buckets": [Place("torch/nn/parallel/distributed.py", "DistributedDataParallel")],
    "_neg_view": [Place("torch/_C/_VariableFunctions.pyi")],
    "_is_root": [Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_is_view": [Place("torch/_C/__init__.pyi", "TensorBase")],
    "_get_iterator": [Place("torch/utils/data/dataloader.py", "DataLoader")],
    "_iterator": [Place("torch/utils/data/dataloader.py", "DataLoader")],
    "_BaseDataLoaderIter": [Place("torch/utils/data/dataloader.py")],
    "_MultiProcessingDataLoaderIter": [Place("torch/utils/data/dataloader.py")],
    "_base_seed": [Place("torch/utils/data/dataloader.py", "_BaseDataLoaderIter")],
    "_reset": [Place("torch/utils/data/dataloader.py", "_BaseDataLoaderIter")],
    "_shared_seed": [Place("torch/utils/data/dataloader.py", "_BaseDataLoaderIter")],
    "_local_tensor": [Place("torch/distributed/tensor/_api.py", "DTensor")],
    "_maybe_attach_flight_recorder": [Place(C10D.file, since=(2, 15))],
    "_mesh_resources": [Place("torch/distributed/device_mesh.py")],
    "_modules": [Place("torch/nn/modules/module.py", "Module"), Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_new_process_group_helper": [C10D],
    "_op_dispatcher": [Place("torch/distributed/tensor/_api.py", "DTensor")],
    "_orig_mod": [Place("torch/_dynamo/eval_frame.py", "OptimizedModule")],
    "_parameters": [Place("torch/nn/modules/module.py", "Module")],
    "_partial_reduce_output": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "_per_optimizer_states": [SCALER],
    "_process_group_name": [C10D],
    "_push_all_rebuilt_params": [_stub("Reducer")],
    "_reset_state": [_stub("Reducer")],
    "_python_dispatch": [_file("torch/utils/_python_dispatch.py")],
    "_pytree": [_file("torch/utils/_pytree.py")],
    "_rebuild_buckets": [_stub("Reducer")],
    "_reduce_scatter_comm": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "_register_backend": [_stub("ProcessGroup")],
    "_scale": [SCALER],
    "_set_default_backend": [_stub("ProcessGroup")],
    "_start_coalescing": [_stub("ProcessGroup")],
    "_world": [C10D],
    "_state_ctx": [Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_states_to_backward_prefetch": [Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_states_to_forward_prefetch": [Place(f"{FSDP}_fsdp_state.py", "FSDPState")],
    "_store_based_barrier": [C10D],
    "_symmetric_memory": [_file("torch/distributed/_symmetric_memory/__init__.py")],
    "_tensor_to_object": [C10D],
    "_threads": [_bound("ProcessGroupGloo._Options")],
    "_timeout": [_stub("Options")],
    "_unsharded_param": [Place(f"{FSDP}_fsdp_param.py", "FSDPParam")],
    "_utils": [_file("torch/distributed/tensor/_utils.py")],
    "_version": [Place("torch/_C/__init__.pyi", "TensorBase")],
}
"""Every private name in the compat modules. The keys are compared with those modules' text."""

UNDOCUMENTED = {
    "ProcessGroupNCCL2": [Place(STUB, since=(2, 15))],
    "ReconfigureOptions": [Place(STUB, since=(2, 15))],
    "all_reduce_grads": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "eager_connect_single_device": [_stub("Backend")],
    "force_sum_reduction_for_comms": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "get_error": [_stub("Backend")],
    "get_reconfigure_handle": [_stub("Backend", (2, 15))],
    "gradient_divide_factor": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "is_high_priority_stream": [_stub("ProcessGroupNCCL")],
    "FsspecWriter": [Place("torch/distributed/checkpoint/_fsspec_filesystem.py")],
    "TorchDispatchMode": [Place("torch/utils/_python_dispatch.py")],
    "add": [Place("torch/_dynamo/trace_rules.py")],
    "all_states": [Place(f"{FSDP}_fsdp_state.py", "FSDPStateContext")],
    "batch_isend_irecv": [C10D],
    "clone": [Place(STUB, "Store", (2, 14)), _bound("Store")],
    "create_device": [_stub("ProcessGroupGloo")],
    "fsdp_params": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "get_backend": [C10D],
    "is_last_backward": [Place(f"{FSDP}_fsdp_state.py", "FSDPStateContext")],
    "is_traceable_wrapper_subclass": [Place("torch/utils/_python_dispatch.py")],
    "manual_backward_finalization": [Place(f"{FSDP}_fsdp_state.py", "FSDPStateContext", (2, 15))],
    "mesh_info": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "mesh_stack": [Place("torch/distributed/device_mesh.py", "_MeshEnv")],
    "monitored_barrier": [C10D],
    "multi_get": [_bound("Store")],
    "post_forward_mesh_info": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "propagate_op_sharding": [Place("torch/distributed/tensor/_sharding_prop.py", "ShardingPropagator")],
    "reduce_grads": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "reduce_scatter_process_group": [Place(f"{FSDP}_fsdp_common.py", "FSDPMeshInfo")],
    "reduce_scatter_unused_params": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "reset_iter_state": [Place(f"{FSDP}_fully_shard.py", "FSDPModule")],
    "reshard_after_backward": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "set_timeout": [_stub("Backend")],
    "sharding_propagator": [Place("torch/distributed/tensor/_dispatch.py", "OpDispatcher")],
    "split_group": [C10D],
    "tree_flatten": [Place("torch/utils/_pytree.py")],
    "tree_unflatten": [Place("torch/utils/_pytree.py")],
    "unshard_async_op": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "unshard_in_backward": [Place(f"{FSDP}_fsdp_param_group.py", "FSDPParamGroup")],
    "unsharded_accumulated_grad": [Place(f"{FSDP}_fsdp_param.py", "FSDPParam")],
}
"""Names without an underscore that torch does not document either."""

LEFT_TO_TORCH = {
    "__init__": "ours calls it",
    "_backend_id": "for the profiler, of a backend that is registered; ours has none",
    "_has_hooks": "torch asks it of its own ProcessGroup class only",
    "_register_backend": "torch calls it on groups that it makes",
    "_set_default_backend": "torch calls it on groups that it makes",
    "_wait_for_pending_works": "torch calls it on its own ProcessGroup class only",
    "bound_device_id": "a field of the base, with no backend behind it",
    "boxed": "wraps the object, ours too",
    "get_group_store": "asked of groups that torch's split_group has made; ours is replaced",
    "unbox": "gives the object back",
    "use_pg_for_symm_mem_rendezvous": "symmetric memory, which maps a peer's: it raises, as the group has no backend",
}
"""Methods that a Python group may leave to the base class, and why."""


ABSENT_BEFORE = {(2, 14): ("gather_single", "gather_into_tensor")}
"""Collectives that a group has only where the installed torch's own has them."""


def _private_names(tree):
    """Yield each private name that a module uses of other objects: attributes, imports, and strings that are names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _is_there(files, name, place):
    if files.series < place.since:
        return True
    if place.file is None and files is VERSIONS[0]:  # a linker may store a name as the end of another one
        bound = attrgetter(place.owner)(native)
        return hasattr(bound, name) or name in (bound.__doc__ or "")  # of a method, its arguments
    if place.file is None:
        return files.binds(name)
    if place.owner == "<file>":
        return files.has_file(place.file)
    return files.defines(place.file, place.owner, name)


def test_the_table_names_what_the_compat_modules_use():
    used = {
        name
        for path in COMPAT
        for name in _private_names(ast.parse(path.read_text(encoding="utf-8")))
        if PRIVATE.fullmatch(name)
    }
    assert used == set(NAMES)


@pytest.mark.parametrize("files", VERSIONS, ids=lambda files: files.version)
def test_torch_has_every_name(files):
    table = NAMES | UNDOCUMENTED
    missing = [
        (name, place.file, place.owner)
        for name, places in table.items()
        for place in places
        if not _is_there(files, name, place)
    ]
    assert missing == []


@pytest.mark.parametrize("files", VERSIONS, ids=lambda files: files.version)
def test_a_group_answers_all_that_torch_asks(files):
    asked = files.methods(STUB, "ProcessGroup") | files.asked_of_groups()
    ours = {name for each in group.Group.__mro__ if each.__module__.startswith("deadpool_run") for name in vars(each)}
    not_here = {name for since, names in ABSENT_BEFORE.items() if VERSIONS[0].series < since for name in names}
    assert asked - ours - not_here - set(LEFT_TO_TORCH) == set()
    assert not ours & (set(LEFT_TO_TORCH) - {"__init__"}), "what is overridden is left to nobody"


def test_the_supported_versions_are_those_that_are_looked_at():
    project = tomllib.loads((torch_files.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = [each for each in project["dependencies"] if each.startswith("torch")]
    low, high = re.fullmatch(r"torch>=(\d+\.\d+),<(\d+\.\d+)", wanted).groups()
    supported = [tuple(map(int, each.split("."))) for each in (low, high)]
    for files in VERSIONS:
        assert supported[0] <= files.series < supported[1], files.version
    assert supported[0] == min(place.since for places in NAMES.values() for place in places)


def test_what_the_forkserver_imports_is_in_torch():
    (files, *_) = VERSIONS
    for name in (each for each in DEFAULT_PRELOAD if each.startswith("torch")):
        path = name.replace(".", "/")
        assert files.has_file(f"{path}.py") or files.has_file(f"{path}/__init__.py"), name


def _own_names(tree):
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return own | {target.id for target in targets if isinstance(target, ast.Name)}


OWN = {name for path in PACKAGE.rglob("*.py") for name in _own_names(ast.parse(path.read_text(encoding="utf-8")))}
"""Every name that is ours, private or not."""


PYTHONS = {"_type_", "_name_", "_value_", "_threads_queues"}
"""Names that ctypes and enum document, and the queue of an executor's thread in Python 3.11 to 3.14."""


def _private_uses(path):
    """Yield line and name of each private name that a module of ours uses of another object, and that is not ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and not _is_self(node.value):
            if (
                _root(node) not in {"os", "sys"}
                and node.attr not in PYTHONS
                and (node.attr not in OWN or node.attr in NAMES or _root(node) == "torch")
            ):
                yield node.lineno, node.attr
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
                names += [alias.name for alias in node.names]
            yield from (
                (node.lineno, name) for name in names if "._" in name or (name.startswith("_") and name[1:2] != "_")
            )
        elif isinstance(node, ast.Call) and _called(node.func) in BY_NAME:
            yield from (
                (node.lineno, each.value)
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value in NAMES
            )


def _root(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _called(func):
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


OTHERS = re.compile(r"(accelerate|lightning|huggingface)\.py")
"""Integrations use private names of their frameworks; of torch they may import none."""


def test_only_the_compat_modules_use_private_names_of_torch():
    found = [
        (str(path.relative_to(PACKAGE)), line, name)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in COMPAT
        for line, name in _private_uses(path)
        if not OTHERS.fullmatch(path.name) or name.startswith("torch")
    ]
    assert found == []
