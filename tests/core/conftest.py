"""`--bless` rewrites the transcripts of the golden scripts: `pytest tests/core --bless`, then read the difference."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--bless", action="store_true", default=False, help="rewrite the transcripts of golden scripts")


@pytest.fixture
def bless(request):
    return request.config.getoption("--bless", default=False)
