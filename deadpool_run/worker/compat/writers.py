"""Functions of libraries that write a file without Python's `open`."""

import sys
from typing import Any


def writers_of_files() -> list[tuple[Any, str, int]]:
    """Return owner and name of each such function that is imported, and which of its arguments is the path."""
    names = (
        ("torch._C", "PyTorchFileWriter", 0),
        ("safetensors", "serialize_file", 1),
        ("safetensors.torch", "serialize_file", 1),
        ("safetensors.numpy", "serialize_file", 1),
    )
    found = ((sys.modules.get(module), name, position) for module, name, position in names)
    return [(module, name, position) for module, name, position in found if hasattr(module, name)]
