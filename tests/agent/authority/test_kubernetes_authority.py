"""Claims in Leases of a small API server with Kubernetes' rules: conflicts, lost answers, refusals, and what people see."""

import pytest
from kit.kubernetes import NAMESPACE

from deadpool_run.agent.authority.claim import LeaderClaim, RunEnd
from deadpool_run.agent.authority.kubernetes_authority import ANNOTATION
from deadpool_run.agent.authority.parse import parse_authority
from deadpool_run.errors import AuthorityError


def claim(term, node="n"):
    return LeaderClaim(term, node, "10.0.0.1", 29400, "run")


@pytest.fixture
def authority(kubernetes):
    return kubernetes.place.authority()


def test_people_see_the_leader_in_the_lease(kubernetes, authority):
    assert authority.claim(claim(4, "gpu-1"))
    ((name, lease),) = kubernetes.leases.items()
    assert name.startswith("leader-run-")
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("gpu-1", 4)
    assert lease["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "deadpool-run"}


def test_annotations_and_fields_of_others_stay(kubernetes, authority):
    assert authority.claim(claim(0))
    (lease,) = kubernetes.leases.values()
    lease["metadata"]["annotations"]["team"] = "speech"
    lease["spec"]["leaseDurationSeconds"] = 15
    assert authority.claim(claim(1))
    (lease,) = kubernetes.leases.values()
    assert lease["metadata"]["annotations"]["team"] == "speech"
    assert lease["spec"]["leaseDurationSeconds"] == 15


def test_conflicts_are_tried_again(kubernetes):
    with kubernetes.place.claimers() as claimers:
        claimers.start("a", "b", "c", "d")
        while not kubernetes.conflicts:
            claimers.race(5)


@pytest.mark.parametrize("term", [0, 1])
def test_a_claim_whose_answer_was_lost_is_granted_when_it_is_made_again(kubernetes, authority, term):
    for before in range(term):
        assert authority.claim(claim(before))
    kubernetes.answers_to_lose = 1
    with pytest.raises(AuthorityError, match=f"cannot claim term {term} at k8s:leader"):
        authority.claim(claim(term))
    assert authority.claim(claim(term))
    assert not authority.claim(claim(term, "other"))


def test_an_end_whose_answer_was_lost_is_recorded_once(kubernetes, authority):
    kubernetes.answers_to_lose = 1
    with pytest.raises(AuthorityError, match="cannot record the run's end"):
        authority.close_run(RunEnd(0, "done"))
    authority.close_run(RunEnd(1, "later"))
    assert authority.read().end == RunEnd(0, "done")


def test_a_lease_that_somebody_deletes_is_made_again(kubernetes, authority):
    assert authority.claim(claim(3))
    kubernetes.leases.clear()
    assert authority.read().claim is None
    assert authority.claim(claim(4))


def test_a_lease_that_something_else_made_is_left_alone(kubernetes, authority):
    assert authority.claim(claim(0))
    (lease,) = kubernetes.leases.values()
    del lease["metadata"]["annotations"][ANNOTATION]
    with pytest.raises(AuthorityError, match="something else made it"):
        authority.claim(claim(1))


@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_a_role_without_a_verb_is_an_error_that_names_it(kubernetes, authority, verb):
    if verb == "update":
        assert authority.claim(claim(0))
    kubernetes.verbs.remove(verb)
    with pytest.raises(AuthorityError, match=f"HTTP 403, .*cannot {verb} resource") as caught:
        authority.claim(claim(1))
    assert "verbs get, create and update on leases" in str(caught.value).splitlines()[-1]


def test_a_token_is_read_each_time(kubernetes, authority, tmp_path):
    token = tmp_path / "account" / "token"
    good = token.read_text()
    token.write_text("expired")
    with pytest.raises(AuthorityError, match="HTTP 401, Unauthorized"):
        authority.claim(claim(0))
    token.write_text(good)
    assert authority.claim(claim(0))


def test_a_pod_without_a_token_and_a_server_that_is_not_trusted_are_errors(kubernetes, authority, tmp_path):
    (tmp_path / "account" / "token").unlink()
    with pytest.raises(AuthorityError, match="No such file"):
        authority.read()
    (tmp_path / "account" / "ca.crt").write_text("not a certificate")
    with pytest.raises(AuthorityError, match="cannot read the run's record"):
        authority.read()


def test_namespaces_are_the_pods_own_or_named(kubernetes):
    def named(text):
        return parse_authority(text, "run", kubernetes.place.environment)

    assert named(f"k8s:{NAMESPACE}/leader").claim(claim(0))
    assert named("k8s:leader").read().claim == claim(0)
    assert named("k8s:other").read().claim is None
    with pytest.raises(AuthorityError, match=r'HTTP 403, .*in the namespace "elsewhere"'):
        named("k8s:elsewhere/leader").read()
