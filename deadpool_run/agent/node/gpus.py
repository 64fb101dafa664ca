"""Failures and use of this machine's GPUs, as NVIDIA's driver reports them through NVML (libnvidia-ml.so.1), where that is present.

Names, values and layouts are those of nvml.h, version 12 (NVIDIA/go-nvml, pkg/nvml/nvml.h). A GPU that has fallen off the bus
may kill its process without an error that the script sees, so nothing else would say why.
"""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_WAIT_MS = 5000
"""GPUs are asked this often whether they are still there, and for their use. Events come at once."""
_SUCCESS, _TIMEOUT = 0, 10
_DOUBLE_BIT_ECC, _XID = 0x2, 0x8
"""nvmlEventTypeDoubleBitEccError and nvmlEventTypeXidCriticalError."""
_GONE = {15: "it has fallen off the bus", 16: "it needs a reset"}
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED."""
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs of programs, after which the GPU is healthy: those that NVIDIA's k8s-device-plugin ignores (internal/rm/health.go)."""
_MEANINGS = {48: "uncorrectable ECC error", 74: "NVLink error", 79: _GONE[15], 95: "uncontained memory error"}


class _EventData(ctypes.Structure):
    """nvmlEventData_t of nvmlEventSetWait_v2."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t of nvmlDeviceGetMemoryInfo, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t of nvmlDeviceGetUtilizationRates, in percent of the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of a GPU by all processes. None: the driver does not say, as with parts of a GPU (MIG)."""

    percent: int | None
    memory: int | None
    """Bytes."""


class GpuWatch:
    """Watches GPUs in a thread: NVML may block for seconds. Make it in a running loop."""

    def __init__(self, count: int, visible: str | None, on_failed: Callable[[int, str], None]) -> None:
        """`on_failed` is called once a GPU, in the loop, with its local rank and the cause.

        `count` is the number of GPUs, 0 if ranks have none of their own; `visible` is CUDA_VISIBLE_DEVICES.
        """
        self._names = [str(at) for at in range(count)] if visible is None else visible.split(",")[:count]
        self._on_failed = on_failed
        self._failed: set[int] = set()
        self._use: dict[int, GpuUse] = {}
        self._closed = threading.Event()
        self._loop = asyncio.get_running_loop() if count else None
        if count:
            threading.Thread(target=self._watch, name="deadpool-gpus", daemon=True).start()

    def use(self, local_rank: int) -> GpuUse | None:
        """Return the last known use of a GPU; None if it is not known, or the GPU has failed."""
        return None if local_rank in self._failed else self._use.get(local_rank)

    def close(self) -> None:
        """Report nothing more."""
        self._closed.set()

    def _watch(self) -> None:
        try:
            nvml = ctypes.CDLL(_LIBRARY)
            wait = nvml.nvmlEventSetWait_v2
        except (OSError, AttributeError):  # no driver, or one from before 2020
            return
        events = ctypes.c_void_p()
        if nvml.nvmlInit_v2() != _SUCCESS or nvml.nvmlEventSetCreate(ctypes.byref(events)) != _SUCCESS:
            return
        devices = dict(self._devices(nvml))
        self._measure(nvml, devices)
        for device in devices.values():
            kinds = ctypes.c_ulonglong()
            nvml.nvmlDeviceGetSupportedEventTypes(device, ctypes.byref(kinds))
            nvml.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(kinds.value & (_XID | _DOUBLE_BIT_ECC)), events)
        while not self._closed.is_set():
            event = _EventData()
            result = wait(events, ctypes.byref(event), ctypes.c_uint(_WAIT_MS))
            if result == _SUCCESS and (reason := _reason(event)):
                for place, device in devices.items():
                    if device.value == event.device:
                        self._report(place, reason)
            elif result not in (_SUCCESS, _TIMEOUT):
                self._closed.wait(_WAIT_MS / 1000)
            self._find_gone(nvml, devices)
            self._measure(nvml, devices)

    def _devices(self, nvml: ctypes.CDLL) -> Iterator[tuple[int, ctypes.c_void_p]]:
        """Yield local ranks and NVML's handles. NVML numbers GPUs by PCI address, as CUDA does with those of one kind."""
        for place, name in enumerate(self._names):
            device, word = ctypes.c_void_p(), name.strip()
            if word.isdecimal():
                found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(device))
            else:
                found = nvml.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(word.encode()), ctypes.byref(device))
            if found == _SUCCESS:
                yield place, device
            elif found in _GONE:
                self._report(place, _GONE[found])

    def _find_gone(self, nvml: ctypes.CDLL, devices: dict[int, ctypes.c_void_p]) -> None:
        for place, device in devices.items():
            degrees = ctypes.c_uint()
            why = _GONE.get(nvml.nvmlDeviceGetTemperature(device, ctypes.c_int(0), ctypes.byref(degrees)), "")
            if why:
                self._report(place, why)

    def _measure(self, nvml: ctypes.CDLL, devices: Mapping[int, ctypes.c_void_p]) -> None:
        for place, device in devices.items():
            memory, busy = _Memory(), _Utilization()
            has_memory = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == _SUCCESS
            has_busy = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == _SUCCESS
            self._use[place] = GpuUse(busy.gpu if has_busy else None, memory.used if has_memory else None)

    def _report(self, place: int, reason: str) -> None:
        if place in self._failed or self._loop is None:
            return
        self._failed.add(place)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, place, reason)

    def _tell(self, place: int, reason: str) -> None:
        if not self._closed.is_set():
            self._on_failed(place, reason)


def _reason(event: _EventData) -> str:
    """Return why the GPU failed; empty if the event does not say that."""
    if event.type == _DOUBLE_BIT_ECC:
        return _MEANINGS[48]
    if event.type != _XID or event.data in _OF_PROGRAMS:
        return ""
    meaning = _MEANINGS.get(event.data, "")
    return f"XID {event.data}: {meaning}" if meaning else f"XID {event.data}"
