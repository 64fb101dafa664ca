"""The cells of the matrix, and functions that run them."""

import sys
from pathlib import Path
from re import findall
from zlib import crc32

from kit.account import States
from kit.cluster import Cluster

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "loop.py"
MODULES = ("items_steps", "items_models", "items_optimizers", "items_data", "items_shapes", "items_variables")
ITEMS = [
    name for each in MODULES for name in findall(r'^@item\("(.+)"\)$', (SCRIPTS / f"{each}.py").read_text(), flags=8)
]
"""The names of all items, found by reading their modules: an import would need torch."""
RANKS = 3
STEPS = 9
PHASES = {
    "forward": "at=forward,n=1",
    "backward": "at=backward,n=1",
    "collective": "at=collective",
    "optimizer": "at=optimizer,n=3",
    "capture": "at=capture",
    "between": "at=between",
}
"""The place of the death in each phase, in the syntax of `faults.py`."""
COLUMNS = ("torchrun", *PHASES)
"""Columns of the document: whether an unfailed run equals torchrun's, and the phases."""
KILL_STEP = 5
KILL_STEPS = {
    "parameters unfrozen and added to the optimizer during training": 4,
    "parameters unfrozen and added to the optimizer during training, FSDP2": 4,
    "gradient accumulation over steps, FSDP2": 4,
}
"""Items with another step of the death."""
PLACES = {
    # A version after an update is always copied. Others are skipped if steps are too short.
    ("gradient accumulation over steps, no_sync", "capture"): "step=6,at=capture",
    ("gradient accumulation over steps, FSDP2", "capture"): "step=6,at=capture",
    ("a fused optimizer, a learning rate that is a tensor", "optimizer"): "at=optimizer,n=1",
    ("optimizers stepped in backward, by hooks that reduce", "optimizer"): "at=optimizer,n=1",
    ("GradScaler and a fused optimizer", "optimizer"): "at=optimizer,n=1",
    ("evaluation every N steps, DDP", "between"): "at=forward,n=4",
    ("evaluation every N steps, FSDP2", "between"): "at=forward,n=4",
    ("gradient accumulation over steps, FSDP2", "optimizer"): "step=5,at=optimizer,n=3",
    ("gradient accumulation over steps, no_sync", "between"): "step=4,at=between",
}


def fault(item: str, phase: str) -> tuple[int, str]:
    """Return the rank that dies, and its fault."""
    rank = crc32(f"{item}/{phase}".encode()) % RANKS
    place = PLACES.get((item, phase), PHASES[phase])
    step = "" if "step=" in place else f"step={KILL_STEPS.get(item, KILL_STEP)},"
    return rank, f"rank={rank},{step}{place}"


CHAIN_STEPS = 18
PER_EPOCH = 5
"""Batches of a rank per epoch, in items with a loader."""
CHAIN = (3, 5, 8, 11, 12, 15)
"""The step of each phase in a run with all phases. Loops that update in every third step do so in 5, 8 and 11."""


def chain(item: str) -> list[tuple[int, str]]:
    """Return six deaths for one run, one in each phase."""
    deaths = []
    for number, phase in enumerate(PHASES):
        place = PLACES.get((item, phase), PHASES[phase]).rpartition("step=")[2].partition(",")
        text = place[2] if place[0].isdigit() else PLACES.get((item, phase), PHASES[phase])
        deaths.append(((number + len(item)) % RANKS, f"step={CHAIN[number]},{text}"))
    return [(rank, f"rank={rank},{text}") for rank, text in deaths]


EXIT_TIMEOUT_S = 90.0
COMPILING = 5
"""The factor for timeouts of jobs in which every replacement compiles."""


def patience(item: str) -> float:
    """Return the timeout for a job of the item, in seconds."""
    return EXIT_TIMEOUT_S * (COMPILING if "compile" in item else 1)


def job(home: Path, item: str, *words: str, steps: int = STEPS, **options: object) -> Cluster:
    """Start a job of the item."""
    home.mkdir(parents=True, exist_ok=True)
    args = ("--item", item, "--steps", str(steps), "--flags", str(home / "flags"), *words)
    # torch never removes compiled files, so they cannot be among the temporary files: none of those may be left.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(home.parent / "compiled"), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    env["COPY_THREAD"] = str(ITEMS.index(item) % 2)
    return Cluster(home, *args, script=SCRIPT, nproc=RANKS, env=env, **{"spares": 1, **options})


def unfailed(home: Path, item: str, *, steps: int = STEPS, torchrun: bool = False) -> States:
    """Return every state of a run without failures."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    cluster = job(home, item, steps=steps, spares=0, launcher=launcher if torchrun else ())
    try:
        assert cluster.wait_exit(patience(item)) == 0, cluster.told()
    finally:
        cluster.close()
    return cluster.account.states()


def run_cell(home: Path, item: str, phase: str, reference: States) -> Cluster:
    """Run one cell and assert every promise."""
    rank, text = fault(item, phase)
    cluster = job(home, item, "--die", text)
    try:
        cluster.wait_exit(patience(item))
        cluster.check_repaired(reference, [rank])
        assert len(cluster.account.of("dying")) == 1, "no rank died"
    finally:
        cluster.close()
    return cluster


def run_chain(home: Path, item: str, reference: States) -> Cluster:
    """Run one job with a death in each phase, and assert every promise."""
    deaths = chain(item)
    words = [word for _, text in deaths for word in ("--die", text)]
    cluster = job(home, item, *words, steps=CHAIN_STEPS)
    try:
        cluster.wait_exit(patience(item))
        died = [(event["step"], event["at"]) for event in cluster.account.of("dying")]
        assert len(died) == len(deaths) or cluster.exit_code, f"only these died: {died}"
        cluster.check_repaired(reference, [rank for rank, _ in deaths])
    finally:
        cluster.close()
    return cluster
