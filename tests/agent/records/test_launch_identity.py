import pytest

from deadpool_run.agent.records import script_copy
from deadpool_run.agent.records.launch_identity import difference, identity_of
from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.core.settings import Settings


@pytest.fixture
def launch(tmp_path):
    """Return the identity of a launch of a script with this content and these arguments, from a folder of its own."""

    def identity(*words, content="print(1)", folder="a", **fields):
        script = tmp_path / folder / "train.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(content)
        target = Target(Mode.PATH, (str(script), *words))
        spec = LaunchSpec(
            settings=Settings(world_size=1),
            target=target,
            script=script_copy.read(target),
            nproc_per_node=1,
            run_dir=tmp_path,
            **{"run_id": "r", **fields},
        )
        return identity_of(spec)

    return identity


def test_nodes_that_run_the_same_script_from_different_folders_are_one_job(launch):
    assert difference("b", launch("--lr", "3", folder="b"), launch("--lr", "3")) == ""


def test_the_first_difference_is_told_with_both_values(launch):
    ours = launch("--lr", "3")
    assert difference("b", launch("--lr", "4"), ours) == (
        "argument 2 is 4 on node b, but 3 in the job: start every node with the same"
    )
    assert difference("b", launch("--lr"), ours).startswith("argument 2 is none on node b, but 3")
    assert difference("b", launch("--lr", "3", "--fast"), ours).startswith("argument 3 is --fast on node b, but none")
    assert difference("b", ours | {"torch": "2.0.1"}, ours).startswith("torch is 2.0.1 on node b, but 2.")


def test_an_older_copy_of_the_script_is_another_script(launch):
    why = difference("b", launch(content="print(2)", folder="b"), launch())
    assert why.startswith("the script's SHA-256 is ")


@pytest.mark.parametrize(("theirs", "refused"), [("r", False), ("s", True), (None, False)])
def test_a_node_that_names_another_run_is_refused_and_one_that_names_none_joins_any(launch, theirs, refused):
    named = {} if theirs is None else {"run_id": theirs, "named": True}
    assert bool(difference("b", launch(**named), launch(named=True))) is refused
