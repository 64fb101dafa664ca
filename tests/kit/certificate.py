"""A certificate for 127.0.0.1 that signs itself, made by the openssl command."""

import shutil
import subprocess

import pytest


def make(folder):
    """Write server.key and server.crt; the latter is also its own authority. Skips the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl, for a certificate")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", folder / "server.key", "-out", folder / "server.crt", "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return folder
