"""A self-signed certificate for 127.0.0.1, made by the openssl command."""

import shutil
import subprocess

import pytest


def make(folder):
    """Write server.key and server.crt, which is also the certificate authority. Skip the test if openssl is missing."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
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
