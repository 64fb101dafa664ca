"""Each kind of authority, ready to be asked by this process and by others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from kit import certificate, etcd
from kit.claimers import Claimers
from kit.kubernetes import KubernetesApi

from deadpool_run.agent.authority import kubernetes_authority
from deadpool_run.agent.authority.parse import parse_authority


@dataclass(frozen=True)
class Place:
    """An authority, as `--authority` and the environment name it."""

    text: str
    environment: Mapping[str, str] = field(default_factory=dict)
    account: tuple[str, ...] = ()

    def authority(self, run_id="run"):
        return parse_authority(self.text, run_id, self.environment)

    def claimers(self, run_id="run"):
        return Claimers(self.text, run_id, self.environment, self.account)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return certificate.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def etcd_server(tmp_path) -> Callable[..., etcd.Etcd]:
    """Start etcd; skipped with the reason where there is none."""
    if etcd.binary() is None:
        pytest.skip("needs etcd on PATH or in DEADPOOL_TEST_ETCD")
    started = []

    def start(**options):
        home = tmp_path / f"etcd{len(started)}"
        home.mkdir()
        started.append(etcd.Etcd(home, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def kubernetes(tmp_path, certificates, monkeypatch):
    api = KubernetesApi(tmp_path / "account", certificates)
    monkeypatch.setattr(kubernetes_authority, "SERVICE_ACCOUNT", tmp_path / "account")
    api.place = Place(
        "k8s:leader",
        {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)},
        (str(tmp_path / "account"),),
    )
    yield api
    api.close()


@pytest.fixture(params=["file", "etcd", "k8s"])
def place(request, tmp_path):
    if request.param == "file":
        return Place(f"file:{tmp_path}")
    if request.param == "etcd":
        return Place(f"etcd://127.0.0.1:{request.getfixturevalue('etcd_server')().port}")
    return request.getfixturevalue("kubernetes").place
