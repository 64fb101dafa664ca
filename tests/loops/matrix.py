"""Which cells the matrix has, and how one is run."""

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
"""Found by reading: importing the items takes torch, and this process does without."""
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
"""Where the rank dies: see `faults.py`."""
COLUMNS = ("torchrun", *PHASES)
"""Of the document: whether an unfailed run is torchrun's, and the phases."""
KILL_STEP = 5
KILL_STEPS = {
    "parameters unfrozen and added to the optimizer during training": 4,
    "parameters unfrozen and added to the optimizer during training, FSDP2": 4,
    "gradient accumulation over steps, FSDP2": 4,
}
"""Items for which another step is worth more."""
PLACES = {
    # A version that follows an update is copied for certain; others are skipped where steps are too short.
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
    """Return who dies, and the fault's text."""
    rank = crc32(f"{item}/{phase}".encode()) % RANKS
    place = PLACES.get((item, phase), PHASES[phase])
    step = "" if "step=" in place else f"step={KILL_STEPS.get(item, KILL_STEP)},"
    return rank, f"rank={rank},{step}{place}"


CHAIN_STEPS = 18
PER_EPOCH = 5
"""Batches of a rank, in the items over a loader."""
CHAIN = (3, 5, 8, 11, 12, 15)
"""The step of each phase in a run with all of them; loops that update at every third step do so at 5, 8 and 11."""


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
"""How much longer a job may take in which every replacement compiles."""


def patience(item: str) -> float:
    """Return how long a job of the item may take, in seconds."""
    return EXIT_TIMEOUT_S * (COMPILING if "compile" in item else 1)


def job(home: Path, item: str, *words: str, steps: int = STEPS, **options: object) -> Cluster:
    """Start an item."""
    home.mkdir(parents=True, exist_ok=True)
    args = ("--item", item, "--steps", str(steps), "--flags", str(home / "flags"), *words)
    # What is compiled stays, by torch's design: not among the temporary files, of which none may be left.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(home.parent / "compiled"), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    return Cluster(home, *args, script=SCRIPT, nproc=RANKS, env=env, **{"spares": 1, **options})


def unfailed(home: Path, item: str, *, steps: int = STEPS, torchrun: bool = False) -> States:
    """Return every state of a run in which nothing fails."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    cluster = job(home, item, steps=steps, spares=0, launcher=launcher if torchrun else ())
    try:
        assert cluster.wait_exit(patience(item)) == 0, cluster.told()
    finally:
        cluster.close()
    return cluster.account.states()


def run_cell(home: Path, item: str, phase: str, reference: States) -> Cluster:
    """Run one cell and assert all that is promised of it."""
    rank, text = fault(item, phase)
    cluster = job(home, item, "--die", text)
    try:
        cluster.wait_exit(patience(item))
        cluster.check_repaired(reference, [rank])
        assert len(cluster.account.of("dying")) == 1, "nobody died"
    finally:
        cluster.close()
    return cluster


def run_chain(home: Path, item: str, reference: States) -> Cluster:
    """Run a death in each phase in one job, and assert all that is promised of it."""
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
