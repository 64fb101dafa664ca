"""The Kubernetes manifests fit the API, each other, and our options. Nothing is run."""

import re
from typing import Any

import pytest
import yaml
from launches import RECIPES
from typer.main import get_command

from deadpool_run.cli.app import app
from deadpool_run.cli.options.table import OPTIONS

FOLDER = RECIPES / "kubernetes"
FILES = ("job.yaml", "jobset.yaml")

# The part of the API that the manifests use: what is not in it is an error. `?` marks what may be left out, a list holds
# the schema of its items, a set the words that may stand there.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
ENV = {
    "name": re.compile(r"[A-Z_]+"),
    "value?": str,
    "valueFrom?": {
        "fieldRef?": {
            "fieldPath": re.compile(r"metadata\.annotations\['batch\.kubernetes\.io/job-completion-index'\]")
        },
        "secretKeyRef?": {"name": NAME, "key": str},
    },
}
POD = {
    "subdomain?": NAME,
    "restartPolicy": {"Never", "OnFailure"},
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": NAME,
            "image": str,
            "command": [str],
            "lifecycle?": {"preStop?": {"exec": {"command": [str]}}},
            "env": [ENV],
            "resources": {"limits": {"nvidia.com/gpu": int}},
        }
    ],
}
RULE = {
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onPodConditions?": [{"type": {"DisruptionTarget"}, "status": {"True", "False", "Unknown"}}],
    "onExitCodes?": {"containerName?": NAME, "operator": {"In", "NotIn"}, "values": [int]},
}
JOB = {
    "completionMode": {"Indexed"},
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [RULE]},
    "template": {"spec": POD},
}
METADATA = {"name": NAME}
SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "Service"): {
        "spec": {"clusterIP": {"None"}, "publishNotReadyAddresses": bool, "selector": {"job-name": NAME}},
    },
    ("batch/v1", "Job"): {"spec": JOB},
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "spec": {
            "network": {"enableDNSHostnames": bool, "subdomain": NAME, "publishNotReadyAddresses": bool},
            "failurePolicy": {"maxRestarts": int},
            "replicatedJobs": [{"name": NAME, "replicas": int, "template": {"spec": JOB}}],
        }
    },
}


def faults(value: Any, schema: Any, where: str) -> list[str]:
    """Return where a value is not as its schema says."""
    match schema:
        case dict() if isinstance(value, dict):
            known = {key.removesuffix("?"): each for key, each in schema.items()}
            missing = [key for key in schema if not key.endswith("?") and key not in value]
            found = [f"{where}: no {key}" for key in missing]
            found += [f"{where}: {key} is not known" for key in value.keys() - known.keys()]
            return found + [
                fault
                for key in value.keys() & known.keys()
                for fault in faults(value[key], known[key], f"{where}.{key}")
            ]
        case [items] if isinstance(value, list) and value:
            return [fault for n, each in enumerate(value) for fault in faults(each, items, f"{where}[{n}]")]
        case set():
            fits = value in schema
        case re.Pattern():
            fits = isinstance(value, str) and schema.fullmatch(value) is not None
        case type():
            fits = type(value) is schema
        case _:
            fits = False
    return [] if fits else [f"{where}: {value!r}"]


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job_of(name):
    document = documents(name)[-1]["spec"]
    return document["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in document else document


def container(name):
    (only,) = job_of(name)["template"]["spec"]["containers"]
    return only


def environment(name):
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container(name)["env"]}


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_fits_the_api(name):
    for document in documents(name):
        schema = SCHEMAS[document["apiVersion"], document["kind"]]
        whole = {"apiVersion": str, "kind": str, "metadata": METADATA, **schema}
        assert faults(document, whole, document["kind"]) == []


def test_the_check_sees_what_is_wrong():
    job = job_of("job.yaml")
    assert faults({**job, "completion": 4}, JOB, "Job") == ["Job: completion is not known"]
    assert faults({**job, "completions": "4"}, JOB, "Job") == ["Job.completions: '4'"]
    assert faults({key: job[key] for key in job.keys() - {"template"}}, JOB, "Job") == ["Job: no template"]
    assert faults({"name": "PET_NNODES", "value": 4}, ENV, "Env") == ["Env.value: 4"], "numbers are to be quoted"


@pytest.mark.parametrize("name", FILES)
def test_the_pods_and_the_options_agree(name):
    job, variables = job_of(name), environment(name)
    ours = {variable for option in OPTIONS for variable in option.variables} | {"DEADPOOL_TOKEN"}
    assert variables.keys() <= ours
    assert int(variables["PET_NNODES"]) == job["completions"] == job["parallelism"]
    assert int(variables["PET_NPROC_PER_NODE"]) == container(name)["resources"]["limits"]["nvidia.com/gpu"]
    assert int(variables["PET_SHUTDOWN_TIMEOUT"]) < job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "as podFailurePolicy demands"
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule] == [
        container(name)["name"]
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_pod_is_drained_before_sigterm(name):
    program, command, *words = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, container(name)["command"][0]) == ("deadpool-run", "deadpool-run"), (
        "the agent is the first process"
    )
    taken = {word for each in get_command(app).commands[command].params for word in each.opts}
    assert command == "drain"
    assert {*words} <= taken


def test_pods_are_met_by_the_names_they_have_the_first_one_first():
    service, job = documents("job.yaml")
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert environment("job.yaml")["PET_RDZV_ENDPOINT"] == endpoints(job["metadata"]["name"], subdomain)
    (jobset,) = documents("jobset.yaml")
    node, network = jobset["spec"]["replicatedJobs"][0], jobset["spec"]["network"]
    prefix = f"{jobset['metadata']['name']}-{node['name']}-0"
    assert environment("jobset.yaml")["PET_RDZV_ENDPOINT"] == endpoints(prefix, network["subdomain"])


def endpoints(prefix, subdomain):
    return ",".join(f"{prefix}-{pod}.{subdomain}:29400" for pod in range(4))


def test_both_manifests_start_the_same():
    one, other = (dict(environment(name)) for name in FILES)
    assert one.pop("PET_RDZV_ENDPOINT") != other.pop("PET_RDZV_ENDPOINT")
    assert one == other
    assert container("job.yaml")["command"] == container("jobset.yaml")["command"] == ["deadpool-run", "train.py"]
