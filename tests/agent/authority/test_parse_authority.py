"""The values of --authority that are understood, and those that are refused with advice."""

import pytest

from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.authority.parse import parse_authority
from deadpool_run.errors import UsageError

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_agents_decide_alone():
    assert parse_authority("agents", "run", {}) is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("file:/shared/jobs", "file:/shared/jobs"),
        ("etcd://h", "etcd://h:2379/deadpool-run"),
        ("etcd://h:1,[::1]:2,10.0.0.1/a/b/", "etcd://h:1,[::1]:2,10.0.0.1:2379/a/b"),
        ("etcds://h/", "etcds://h:2379/deadpool-run"),
        ("k8s:leader", "k8s:leader"),
        ("k8s:training/leader", "k8s:training/leader"),
    ],
)
def test_what_is_understood(text, where):
    assert parse_authority(text, "run", POD).where == where


@pytest.mark.parametrize(
    ("text", "why", "advice"),
    [
        ("", "not an authority", "write agents, file:/DIR, etcd://"),
        ("zookeeper://h:2181", "not an authority", "write agents, file:/DIR, etcd://"),
        ("/shared", "not an authority", "file:/DIR"),
        ("file:shared", "not an absolute path", "file:/DIR"),
        ("file:", "not an absolute path", "file:/DIR"),
        ("etcd:h:1", "not addresses of etcd", "etcd://HOST:PORT"),
        ("etcd://", "not addresses of etcd", "etcd://HOST:PORT"),
        ("etcd://h:0", "not addresses of etcd", "etcd://HOST:PORT"),
        ("etcd://h:x", "not addresses of etcd", "etcd://HOST:PORT"),
        ("etcd://h,", "not addresses of etcd", "etcd://HOST:PORT"),
        ("etcd://h:1?x=2", "not addresses of etcd", "etcd://HOST:PORT"),
        ("etcds://me:pw@h:1", "not addresses of etcd", "ETCDCTL_USER"),
        ("k8s:", "not the name of a Lease", "k8s:NAME"),
        ("k8s:Leader", "not the name of a Lease", "lower-case"),
        ("k8s:a/b/c", "not the name of a Lease", "k8s:NAMESPACE/NAME"),
        ("k8s:-a", "not the name of a Lease", "lower-case"),
        ("k8s:" + "a" * 101, "not the name of a Lease", "lower-case"),
    ],
)
def test_what_is_not_understood_is_refused_with_advice(text, why, advice):
    with pytest.raises(UsageError) as caught:
        parse_authority(text, "run", POD)
    first, last = str(caught.value).splitlines()
    assert why in first
    assert advice in last


def test_outside_a_pod_there_is_no_lease():
    with pytest.raises(UsageError, match="not in a pod"):
        parse_authority("k8s:leader", "run", {})


@pytest.mark.parametrize("wrong", [{"term": -1}, {"term": 1 << 31}, {"port": -1}, {"port": 1 << 16}])
def test_a_claim_has_sane_numbers(wrong):
    with pytest.raises(ValueError, match="is not from 0 to"):
        LeaderClaim(**{"term": 0, "node": "n", "address": "h", "port": 1, "run_id": "run", **wrong})
