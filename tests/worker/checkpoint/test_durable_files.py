"""Durable checkpoints as files: what was written comes back byte for byte; what is torn, damaged or foreign does not."""

import enum
import os
import pickle
import shutil
import subprocess
from collections import deque

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from snapshot_kit import Training
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from deadpool_run.errors import CheckpointError
from deadpool_run.vault import checkpoint_format
from deadpool_run.vault.checkpoint_format import CheckpointStep
from deadpool_run.vault.segments import complete_version, read_exactly, read_header, read_manifest
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.wire.checkpoints import ChooseCheckpoint, FillSlots, TakeStep
from deadpool_run.worker.checkpoint import main
from deadpool_run.worker.checkpoint.read import choose, fill
from deadpool_run.worker.checkpoint.shared import SharedCheckpoint
from deadpool_run.worker.checkpoint.storage import storage_at

RANKS = 2
RUN = "this-run"


def lent(slots):
    return dict(enumerate(slots.fds))


def write(slots, target, run=RUN, keep=2):
    """Write the newest committed version as the checkpointer of the only node does; return its name."""
    return write_shared(slots, [list(range(len(slots.fds)))], target, keep, run)


def write_shared(slots, nodes, target, keep=2, run=RUN):
    """Write the newest committed version as several nodes' checkpointers do, which have these ranks; return its name.

    The last of them leads; it may have none.
    """
    version = slots.status_page.committed()
    slots.status_page.kept = version
    shares = [SharedCheckpoint(slots.status_page, {rank: slots.fds[rank] for rank in ranks}) for ranks in nodes]
    for step in CheckpointStep:
        for at, share in enumerate(shares):
            leads = at == len(shares) - 1
            takes_part = step in (CheckpointStep.PREPARE, CheckpointStep.COPY) or nodes[at]
            if leads if step is CheckpointStep.COMPLETE else takes_part:
                firsts = tuple(ranks[0] for ranks in nodes if ranks)
                order = (
                    str(step),
                    str(target),
                    run,
                    "a1",
                    version,
                    keep,
                    sum(map(len, nodes)),
                    firsts,
                    leads,
                    tuple(nodes[at]),
                )
                taken = share.take(TakeStep(*order))
    assert slots.status_page.kept == EMPTY
    assert taken.where == storage_at(str(target)).where(checkpoint_format.name_of(version))
    return checkpoint_format.name_of(version)


def read(slots, target, *, resume="auto", run=RUN, first=True, world_size=RANKS):
    """Fill the slots of every rank as the only node does: from the newest checkpoint that can be loaded."""
    order, refused = ChooseCheckpoint(str(target), run, str(resume), first, world_size, []), []
    while True:
        try:
            found = choose(order)
        except CheckpointError as error:
            raise CheckpointError("\n".join((*refused, str(error)))) from error
        refused += found.refused
        if found.version == checkpoint_format.NOTHING:
            return found
        try:
            return replace(fill(FillSlots(found.where, world_size, found.record), lent(slots)), refused=refused)
        except CheckpointError as error:
            refused.append(f"checkpoint {found.where} is refused: {error}")
            order.but.append(found.where)


@pytest.fixture
def made(make_slots):
    return lambda ranks=RANKS: make_slots(ranks)


@pytest.fixture
def trained(made):
    """Slots of two ranks that train alike but for their buffers, and a function that trains them by one step."""
    slots = made()
    trainings = [Training(1), Training(1)]
    snapshots = [each.protected_by(slots.own(rank)) for rank, each in enumerate(trainings)]
    version = 0

    def step():
        nonlocal version
        version += 1
        for rank, (training, own) in enumerate(zip(trainings, snapshots, strict=True)):
            torch.manual_seed(version + rank)  # the ranks differ in all from here on, but for what has no gradient
            training.step(own)
            own.capture_now(version)
        return version

    step()
    yield slots, step
    for own in snapshots:
        own.close()


def image(slots, rank, version):
    """The content of a slot that holds this version: the manifest, and the bytes of everything that it names."""
    fd = next(fd for fd in slots.fds[rank] if complete_version(fd) == version)
    header, manifest = read_header(fd), read_manifest(fd, version)
    return header, manifest, [read_exactly(fd, nbytes, offset) for offset, nbytes in manifest.ranges()]


def remote(place):
    return f"file://{place}"


class Norm(enum.IntEnum):
    SIGN = 1


class Projector:
    """An object in an optimizer's groups."""

    def __init__(self):
        self.rank = 2


def test_the_metadata_has_no_class_that_others_do_not_have(made, tmp_path):
    slots, model = made(1), nn.Linear(2, 2)
    more = {"norm": Norm.SIGN, "last": deque([1, 2], 2), "projector": Projector()}
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), **more}], lr=0.5)
    own = slots.own(0, protect={"model": model, "optimizer": optimizer})
    own.capture_now(1)
    own.close()
    name = write(slots, tmp_path)
    dcp_to_torch_save(tmp_path / name, tmp_path / "all.pt")
    group = torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert {key: group[key] for key in more} == {"norm": "SIGN", "last": [1, 2], "projector": {"rank": 2}}


def test_a_failure_shows_no_password_of_a_url():
    target = "nowhere://me:secret@host/kept"
    order = ChooseCheckpoint(target, RUN, resume="auto", first=True, world_size=1, but=[])
    why = main._answered(order, {}, None).why
    assert why.startswith("nowhere://me:***@host/kept: ")
    assert "secret" not in why


@pytest.mark.parametrize("kind", [str, remote])
def test_slots_come_back_byte_for_byte(trained, made, tmp_path, kind):
    slots, step = trained
    step()
    target = kind(tmp_path / "kept")
    assert write(slots, target) == "step-00000002"
    other = made()
    found = read(other, target)
    assert (found.version, found.refused) == (2, [])
    assert [image(other, rank, 2) for rank in range(RANKS)] == [image(slots, rank, 2) for rank in range(RANKS)]


@pytest.mark.parametrize("nodes", [[[1], [0]], [[0, 1], []]])
@pytest.mark.parametrize("kind", [str, remote])
def test_what_several_nodes_write_is_what_one_would(trained, tmp_path, kind, nodes):
    slots, _ = trained
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    name = write(slots, kind(alone))
    assert write_shared(slots, nodes, kind(shared)) == name
    for one, other in zip(files_of(alone, name), files_of(shared, name), strict=True):
        assert one.name == other.name
        if one.name not in (checkpoint_format.RECORD, ".metadata"):  # which have a time, and an id of the writer's
            assert one.read_bytes() == other.read_bytes(), one.name
    first, second = (metadata_of(place / name) for place in (alone, shared))
    assert first == second


def metadata_of(checkpoint):
    found = dcp.FileSystemReader(checkpoint).read_metadata()
    return found.state_dict_metadata, found.planner_data, found.storage_data


@pytest.mark.parametrize("kind", [str, remote])
def test_several_nodes_fill_their_slots_from_what_several_wrote(trained, made, tmp_path, kind):
    slots, _ = trained
    target = kind(tmp_path / "kept")
    write_shared(slots, [[0], [1]], target)
    other = made()
    found = choose(ChooseCheckpoint(target, RUN, "auto", first=True, world_size=RANKS, but=[]))
    assert (found.version, found.where) == (1, f"{target}/step-00000001")
    for rank in range(RANKS):
        assert fill(FillSlots(found.where, RANKS, found.record), {rank: other.fds[rank]}).version == 1
    assert [image(other, rank, 1) for rank in range(RANKS)] == [image(slots, rank, 1) for rank in range(RANKS)]


def test_a_node_that_sees_another_checkpoint_there_does_not_load_it(trained, made, tmp_path):
    """As when a link is moved to another checkpoint meanwhile, or each machine has its own directory under one path."""
    slots, _ = trained
    for run in ("one", "other"):
        write(slots, tmp_path / run, run=run)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one" / "step-00000001")
    found, other = choose(ChooseCheckpoint("", RUN, str(link), first=True, world_size=RANKS, but=[])), made()
    assert fill(FillSlots(found.where, RANKS, found.record), {0: other.fds[0]}).version == 1
    link.unlink()
    link.symlink_to(tmp_path / "other" / "step-00000001")
    with pytest.raises(CheckpointError, match="is another checkpoint on this node") as refused:
        fill(FillSlots(found.where, RANKS, found.record), {1: other.fds[1]})
    theirs = choose(ChooseCheckpoint("", RUN, str(link), first=True, world_size=RANKS, but=[])).record
    assert theirs != found.record
    for word in (found.record[:12], theirs[:12], "run other"):
        assert word in str(refused.value)
    assert complete_version(other.fds[1][0]) is None


def test_what_one_node_could_not_load_is_passed_over_by_all(trained, made, tmp_path):
    slots, step = trained
    write_shared(slots, [[0], [1]], tmp_path)
    step()
    name = write_shared(slots, [[0], [1]], tmp_path)
    spoil(tmp_path / name / "rank-00001.deadpool")
    order = {"target": str(tmp_path), "run": RUN, "resume": "auto", "first": True, "world_size": RANKS}
    found, other = choose(ChooseCheckpoint(**order, but=[])), made()
    assert found.version == 2
    fill(FillSlots(found.where, RANKS, found.record), {0: other.fds[0]})
    with pytest.raises(CheckpointError, match=r"rank-00001\.deadpool is damaged"):
        fill(FillSlots(found.where, RANKS, found.record), {1: other.fds[1]})
    assert complete_version(other.fds[1][0]) is None
    older = choose(ChooseCheckpoint(**order, but=[found.where]))
    assert older.version == 1
    with pytest.raises(CheckpointError, match="There is no other checkpoint to resume from"):
        choose(ChooseCheckpoint(**order, but=[found.where, older.where]))


def test_a_version_that_is_gone_is_not_mixed_with_another(trained, tmp_path):
    slots, step = trained
    share = SharedCheckpoint(slots.status_page, lent(slots))
    orders = [
        TakeStep(str(at), str(tmp_path), RUN, "a1", 1, 2, RANKS, (0,), leads=True, ranks=tuple(range(RANKS)))
        for at in (CheckpointStep.PREPARE, CheckpointStep.COPY)
    ]
    share.take(orders[0])
    step()
    step()
    with pytest.raises(CheckpointError, match="not every rank holds version 1 any more"):
        share.take(orders[1])
    assert not list(tmp_path.iterdir())


def test_what_another_attempt_left_is_removed(trained, tmp_path):
    slots, _ = trained
    (tmp_path / "step-00000001.deadbeef.tmp").mkdir()
    write_shared(slots, [[0], [1]], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_nothing_there_is_nothing_to_go_on_from(made, tmp_path):
    for resume in ("auto", "never"):
        assert read(made(), tmp_path / "kept", resume=resume).version == checkpoint_format.NOTHING


def test_as_many_as_are_wanted_are_kept(trained, tmp_path):
    slots, step = trained
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000099").mkdir()  # newer: not this run's to remove
    for _ in range(4):
        step()
        write(slots, tmp_path, keep=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes", "step-00000003", "step-00000004", "step-00000005", "step-00000099"]


def test_what_a_killed_writer_left_is_passed_over_and_then_removed(trained, made, tmp_path):
    slots, step = trained
    write(slots, tmp_path)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002.tmp")
    assert read(made(), tmp_path).version == 1
    step()
    write(slots, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_was_refused_is_made_again_in_its_place(trained, made, tmp_path):
    slots, _ = trained
    write(slots, tmp_path)
    (tmp_path / "step-00000001" / checkpoint_format.RECORD).unlink()
    write(slots, tmp_path)
    assert read(made(), tmp_path).version == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_was_cut_off_in_an_object_store_is_no_checkpoint(trained, made, tmp_path):
    slots, step = trained
    target = remote(tmp_path)
    write(slots, target)
    cut_off = []
    for _ in range(2):
        step()
        cut_off.append(write(slots, target))
        (tmp_path / cut_off[-1] / checkpoint_format.RECORD).unlink()
    found = read(made(), target)
    assert (found.version, found.refused) == (1, [])
    assert read(made(), target, resume=f"{target}/step-00000001").version == 1
    step()
    write(slots, target)
    assert len(list(tmp_path.iterdir())) == 4, "of the two that are kept, one is version 1"
    step()
    write(slots, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    for name in ("step-00000004", "step-00000005"):
        (tmp_path / name / checkpoint_format.RECORD).unlink()
    assert read(made(), target).version == checkpoint_format.NOTHING


def test_one_that_has_no_record_is_not_counted_among_those_that_are_kept(trained, tmp_path):
    slots, step = trained
    write(slots, tmp_path)
    step()
    (tmp_path / write(slots, tmp_path) / checkpoint_format.RECORD).unlink()
    step()
    write(slots, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_link_in_the_place_of_a_checkpoint_is_replaced_and_what_it_leads_to_stays(trained, made, tmp_path):
    slots, step = trained
    kept, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    (elsewhere / "foreign").mkdir(parents=True)
    kept.mkdir()
    (kept / "step-00000000.old").symlink_to(elsewhere / "foreign")  # as an interrupted writer leaves one
    (kept / "step-00000000.tmp").symlink_to(elsewhere / "missing")
    (kept / "step-00000001").symlink_to(elsewhere / "foreign")
    write(slots, kept)
    assert [path.name for path in kept.iterdir()] == ["step-00000001"]
    (kept / "step-00000001").rename(elsewhere / "moved")
    (kept / "step-00000001").symlink_to(elsewhere / "moved")
    (kept / "step-00000002").symlink_to(elsewhere / "missing")
    step()
    write(slots, kept, keep=1)
    assert [path.name for path in kept.iterdir()] == ["step-00000002"]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["foreign", "moved"]
    assert read(made(), "", resume=elsewhere / "moved").version == 1


@pytest.fixture
def lasting(tmp_path):
    """Make a file that cannot be removed, as one that another program holds on some file servers."""

    def last(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.parent.chmod(0o555)
        if os.geteuid() == 0 and subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
            pytest.skip("root can remove any file here")

    yield last
    subprocess.run(["chattr", "-R", "-f", "-i", tmp_path], capture_output=True, check=False)
    for path in tmp_path.rglob("held"):
        path.chmod(0o755)


def test_what_cannot_be_removed_is_reported_and_hinders_no_checkpoint(trained, made, tmp_path, lasting):
    slots, step = trained
    lasting(tmp_path / "step-00000000.old" / "held" / "file")
    lasting(tmp_path / write(slots, tmp_path) / "held" / "file")  # rejected at the start, and written again
    storage = storage_at(str(tmp_path))
    write(slots, tmp_path)
    assert read(made(), tmp_path).version == 1
    lasting(tmp_path / "step-00000001" / "held" / "file")
    step()
    write(slots, tmp_path, keep=1)
    found = read(made(), tmp_path)
    assert (found.version, found.refused) == (2, [])
    storage.begin("step-00000003", "a1")
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".old")
    assert [line.partition(" could not be cleaned up: ")[0] for line in sorted(storage.uncleaned)] == [
        str(tmp_path / name) for name in left
    ]
    assert len(left) == 3


def files_of(target, name):
    return sorted((path for path in (target / name).iterdir()), key=lambda path: path.name)


def flip(path, at):
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spoil(path):
    """Change the middle of a file, a disk's block of it."""
    data = bytearray(path.read_bytes())
    middle = slice(max(0, len(data) // 2 - 2048), len(data) // 2 + 2048)
    data[middle] = bytes(byte ^ 0x55 for byte in data[middle])
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


DAMAGES = {
    "changed": spoil,
    "cut": cut,
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
}
FILES = (
    ".metadata",
    "__0_0.distcp",
    "__1_0.distcp",
    checkpoint_format.RECORD,
    "rank-00000.deadpool",
    "rank-00001.deadpool",
)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_one_is_refused_and_the_older_one_taken(trained, made, tmp_path, file, damage):
    slots, step = trained
    write(slots, tmp_path)
    before = [image(slots, rank, 1) for rank in range(RANKS)]
    step()
    name = write(slots, tmp_path)
    assert tuple(path.name for path in files_of(tmp_path, name)) == FILES
    DAMAGES[damage](tmp_path / name / file)
    other = made()
    found = read(other, tmp_path)
    assert found.version == 1
    assert [image(other, rank, 1) for rank in range(RANKS)] == before
    (said,) = found.refused
    assert f"checkpoint {tmp_path / name} is refused" in said
    assert file in said
    with pytest.raises(CheckpointError, match="is refused") as refused:
        read(made(), "", resume=tmp_path / name)
    assert file in str(refused.value)


def test_every_byte_of_a_tensor_counts(trained, made, tmp_path):
    """Where torch keeps a tensor's bytes, any one that is changed is found."""
    slots, _ = trained
    name = write(slots, tmp_path)
    path = tmp_path / name / "__0_0.distcp"
    whole = path.read_bytes()
    manifest = image(slots, 0, 1)[1]
    entry = next(entry for entry in manifest.tensors if entry.name == "model/5.weight")
    fd = next(fd for fd in slots.fds[0] if complete_version(fd) == 1)
    start = whole.index(read_exactly(fd, entry.nbytes, entry.offset))
    for at in (start, start + entry.nbytes // 2, start + entry.nbytes - 1):
        flip(path, at)
        with pytest.raises(CheckpointError, match=r"the digest of model/5\.weight is not the recorded one"):
            read(made(), tmp_path)
        path.write_bytes(whole)
    assert read(made(), tmp_path).version == 1


def test_if_none_is_whole_the_job_does_not_begin(trained, made, tmp_path):
    slots, step = trained
    write(slots, tmp_path)
    step()
    write(slots, tmp_path)
    for version in (1, 2):
        flip(tmp_path / checkpoint_format.name_of(version) / "rank-00001.deadpool", 2000)
    other = made()
    with pytest.raises(CheckpointError) as refused:
        read(other, tmp_path)
    assert str(refused.value).count("is refused: rank-00001.deadpool is damaged") == 2
    assert [complete_version(fd) for pair in other.fds for fd in pair] == [None] * 4


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_foreign_ones_are_refused_and_never_unpickled(trained, made, tmp_path, monkeypatch):
    slots, _ = trained
    kept = tmp_path / "kept"
    write(slots, kept)
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=kept / "step-00000005", no_dist=True)
    (kept / "step-00000006").mkdir()
    (kept / "step-00000006" / checkpoint_format.RECORD).write_text(
        '{"kind": "something else", "format": 2, "digest": ""}'
    )
    shutil.copytree(kept / "step-00000001", kept / "step-00000007")
    shutil.copytree(kept / "step-00000001", tmp_path / "bomb")
    (tmp_path / "bomb" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    monkeypatch.chdir(tmp_path)
    found = read(made(), kept)
    assert found.version == 1
    wanted = (
        "step-00000007 is refused: its deadpool.json has version 1: somebody has renamed it from step-00000001",
        "step-00000006 is refused: deadpool.json is the record of a 'something else'",
        "step-00000005 is refused: it has no deadpool.json",
    )
    for said, want in zip(found.refused, wanted, strict=True):
        assert want in said
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read(made(), "", resume=tmp_path / "bomb")
    assert not (tmp_path / "unpickled").exists()


def test_one_of_another_format_is_refused(trained, made, tmp_path):
    slots, _ = trained
    path = tmp_path / write(slots, tmp_path) / checkpoint_format.RECORD
    path.write_text(path.read_text().replace(f'"format": {checkpoint_format.FORMAT}', '"format": 99'))
    with pytest.raises(
        CheckpointError,
        match=f"of format 99, and this version of deadpool-run reads only format {checkpoint_format.FORMAT}",
    ):
        read(made(), tmp_path)


def test_one_of_another_world_is_refused(trained, made, tmp_path):
    slots, _ = trained
    write(slots, tmp_path)
    with pytest.raises(CheckpointError, match="it has 2 ranks, and this world has 3"):
        read(made(3), tmp_path, world_size=3)


def test_the_one_that_was_named_is_taken_and_no_other(trained, made, tmp_path):
    slots, step = trained
    write(slots, tmp_path / "old")
    assert read(made(), tmp_path / "new", resume=tmp_path / "old" / "step-00000001").version == 1
    with pytest.raises(CheckpointError, match=r"it has no deadpool\.json"):
        read(made(), tmp_path / "old", resume=tmp_path / "old" / "step-00000009")
    step()
    write(slots, tmp_path / "old")
    with pytest.raises(CheckpointError, match="holds step-00000002, which this run must not resume from"):
        read(made(), tmp_path / "old", resume=tmp_path / "old" / "step-00000001")
    with pytest.raises(CheckpointError, match="holds step-00000001, step-00000002, which this run"):
        read(made(), tmp_path / "old", resume="never")


def test_version_0_is_not_newer_than_itself(made, tmp_path):
    (tmp_path / "step-00000000").mkdir()
    with pytest.raises(CheckpointError, match=r"it has no deadpool\.json"):
        read(made(), tmp_path, resume=tmp_path / "step-00000000")


def test_a_world_that_begins_again_goes_on_from_what_its_run_has_written(trained, made, tmp_path):
    slots, step = trained
    write(slots, tmp_path, run="an older one")
    again = {"resume": "never", "first": False}
    assert read(made(), tmp_path, **again).version == checkpoint_format.NOTHING
    step()
    write(slots, tmp_path)
    assert read(made(), tmp_path, **again).version == 2


@pytest.mark.parametrize("damage", [spoil, cut, lambda path: path.unlink()], ids=["changed", "cut", "missing"])
def test_a_world_that_begins_again_names_a_damaged_one_and_never_begins_at_step_0(trained, made, tmp_path, damage):
    slots, step = trained
    again = {"resume": "never", "first": False}
    write(slots, tmp_path)
    step()
    damage(tmp_path / write(slots, tmp_path) / checkpoint_format.RECORD)
    found = read(made(), tmp_path, **again)
    assert found.version == 1
    assert "step-00000002 is refused: " in found.refused[0]
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="step-00000002 is refused: "):
        read(made(), tmp_path, **again)


def test_a_world_that_begins_again_takes_no_checkpoint_from_before_the_one_that_was_named(trained, made, tmp_path):
    slots, step = trained
    write(slots, tmp_path / "old")  # of an earlier run, which had the same id
    step()
    write(slots, tmp_path / "other")
    again = {"resume": tmp_path / "other" / "step-00000002", "first": False}
    assert read(made(), tmp_path / "old", **again).version == 2
    step()
    write(slots, tmp_path / "old")
    assert read(made(), tmp_path / "old", **again).version == 3


def test_names():
    assert checkpoint_format.version_in(checkpoint_format.name_of(12)) == 12
    assert checkpoint_format.version_in("step-00000012.tmp") is None
    assert checkpoint_format.leftover("step-00000012.tmp")
    assert checkpoint_format.leftover("step-00000012.0a1b.tmp")
    assert checkpoint_format.leftover("step-00000012.old")
    assert not checkpoint_format.leftover("notes.tmp")
