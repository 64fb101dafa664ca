"""The artefacts under test: what `make dist` has built, or else built here."""


def pytest_addoption(parser):
    parser.addoption("--artefacts", metavar="DIR", help="build the sdist and the wheel into this folder")
