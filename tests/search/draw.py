"""Jobs drawn from a seed: a training loop, a layout and one to four faults. Equal seeds give equal jobs."""

import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from re import findall
from typing import Any

LOOPS = Path(__file__).parent.parent / "loops" / "scripts"
ITEMS = [
    name
    for module in ("items_steps", "items_models", "items_optimizers", "items_data", "items_variables")
    for name in findall(r'^@item\("(.+)"\)$', (LOOPS / f"{module}.py").read_text(encoding="utf-8"), flags=8)
    if "compile" not in name  # a replacement takes minutes
]
"""The matrix's loops, found by reading its modules: an import would need torch."""

WRAPS = {"ddp": 8, "fsdp": 6, "hsdp": 3, "tp": 3, "pp": 3, "plain": 4}
"""Ways to distribute the model over the ranks, with their weights in the draw."""
OPTIMIZERS = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "amsgrad",
    "rmsprop",
    "adagrad",
    "nadam",
    "foreach",
    "fused",
)
SCHEDULERS = ("step", "one-cycle", "cosine", "lambda", "sequential")
BETWEEN = ("evaluate", "metric", "gather", "objects", "broadcast", "barrier", "subgroup", "async", "plateau", "print")
"""Actions of a script between steps. Most of them run collectives."""
CARRIERS = (
    "module",
    "library",
    "environment",
    "alias",
    "identity",
    "settings",
    "files",
    "values",
    "positions",
    "assigned",
    "parts",
)
"""Places where a script carries state from step to step: see `carriers.py`."""
BREACHES = {
    "unprotected-optimizer": "optimizer",
    "unprotected-scheduler": "scheduler",
    "unprotected-average": "average",
    "unprotected-second": "optimizer",
    "carried-batch": "batch",
    "carried-average": "average",
    "iterator": "iterator",
    "late-collective": "collective",
    "skips-rehearsal": "rehears",
    "data-write": "data",
    "attribute": "attribute|buffer|variable",
    "stepped-in-backward": "backward",
    "swallows": "except|swallow|computes something else",
    "range": "job.steps",
}
"""Breaches of the rules for scripts. A job with one is refused, with a text that has one of these words, or is exact."""

PLACES = {
    "setup": 1,
    "before": 2,
    "forward": 5,
    "backward": 5,
    "issue": 5,
    "collective": 8,
    "optimizer": 6,
    "after": 3,
    "capture": 5,
    "between": 4,
    "rehearsal": 3,
    "end": 2,
}
"""Places in `faults.py`, with their weights in the draw."""
COUNTS = {"forward": 4, "backward": 4, "issue": 8, "collective": 8, "optimizer": 12}
"""Places that a step can pass more than once."""
KINDS = {"sigkill": 10, "sigstop": 3, "sigsegv": 3, "abort": 2, "_exit": 2, "sigterm": 2, "raise-once": 4}
SIGNALS = {"SIGKILL": 6, "SIGSTOP": 2, "SIGSEGV": 1, "SIGABRT": 1, "SIGTERM": 1}
HANG_TIMEOUT_S = 3


@dataclass(frozen=True)
class Strike:
    """A signal from outside, some time after an event: to the holder of a rank, or to the newest worker."""

    target: str
    """`rank 2`, or `newest`."""
    signal: str
    after_version: int = -1
    """`ms` counts from the first rank that reaches this version; if it is -1, from the death number `after_death`."""
    after_death: int = 0
    ms: int = 0


@dataclass(frozen=True)
class Job:
    """A drawn job."""

    seed: int
    loop: dict[str, Any]
    """Only `item` for a loop of the matrix; otherwise the parts for `composed.py`."""
    ranks: int
    steps: int
    spares: int
    options: tuple[str, ...] = ()
    deaths: tuple[str, ...] = ()
    """Faults at places in the script, in the syntax of `faults.py`."""
    strikes: tuple[Strike, ...] = field(default_factory=tuple)
    under_torchrun: bool = False
    """Whether torchrun runs the unfailed job."""
    planted: bool = False
    """Whether replacements spoil a weight. It is never drawn, only set by a test of the search."""

    @property
    def breach(self) -> str:
        """The rule that the loop breaks; empty if it breaks none."""
        return str(self.loop.get("breach", ""))

    def to_json(self) -> str:
        """Return the job as JSON, which a user can edit and run again."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        strikes = tuple(Strike(**each) for each in fields.pop("strikes"))
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}, strikes=strikes)


def draw(seed: int) -> Job:
    """Return the job of a seed."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 2, 2, 2, 3, 3, 4))
    if dice.random() < 0.2:
        loop: dict[str, Any] = {"item": dice.choice(ITEMS)}
    else:
        loop = _composed(dice, ranks)
        loop |= _carried(random.Random(f"carried {seed}"), loop)  # so that older seeds keep the rest of their jobs
        if loop["wrap"] in ("hsdp", "tp") and ranks == 3:  # their meshes have two dimensions
            ranks = 4
    steps = dice.randint(8, 14)
    deaths, strikes = _faults(dice, ranks, steps)
    if loop.get("breach") == "swallows":
        deaths = tuple(map(_uncaught, deaths))
    if loop.get("breach") == "range":  # only loops over job.steps are checked for hangs
        deaths = tuple(death.replace("how=sigstop", "how=sigkill") for death in deaths)
        strikes = tuple(replace(strike, signal=strike.signal.replace("STOP", "KILL")) for strike in strikes)
    return Job(
        seed=seed,
        loop=loop,
        ranks=ranks,
        steps=steps,
        spares=dice.choice((0, 1, 1, 1, 2)),
        options=_options(dice, stops="STOP" in f"{deaths}{strikes}".upper()),
        deaths=deaths,
        strikes=strikes,
        under_torchrun=dice.random() < 0.15,
    )


def _weighted(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]


def _options(dice: random.Random, *, stops: bool) -> tuple[str, ...]:
    options = ["--abort-timeout", "10"]
    start = dice.random()
    if start < 0.3:
        options += ["--spare-mode", "hot"]
    elif start < 0.4:
        options += ["--start-method", "spawn"]
    if dice.random() < 0.25:
        options += ["--capture-interval", dice.choice("234")]
    if stops:
        options += ["--hang-timeout", str(HANG_TIMEOUT_S)]
    return tuple(options)


# --- loops -----------------------------------------------------------------------------------------------------------


def _composed(dice: random.Random, ranks: int) -> dict[str, Any]:
    wrap = _weighted(dice, WRAPS)
    replicated = wrap in ("ddp", "plain")
    whole = wrap not in ("tp", "pp")  # each rank runs the whole model, on ordinary tensors
    loop: dict[str, Any] = {
        "wrap": wrap,
        "width": dice.choice((8, 12, 24)),
        "blocks": [_block(dice, whole=whole) for _ in range(dice.randint(2, 4))],
        "trains": dice.choice(("all", "all", "all", "frozen", "adapters")) if whole else "all",
        "optimizers": [dice.choice(OPTIMIZERS) for _ in range(dice.choice((1, 1, 1, 2, 3)))],
        "scheduler": dice.choice(("", "", *SCHEDULERS)),
        "scheduler_at": dice.choice(("inside", "between")),
        "zero": dice.choice(("after", "before")),
        "to_none": dice.random() < 0.7,
        "micro": dice.choice((1, 1, 1, 2, 3)),
        "data": dice.choice(("keyed", "keyed", "global", "batches", "batches-workers", "protected")),
        "average": dice.choice(("", "", "", "inside", "between")),
        "teacher": whole and dice.random() < 0.15,
        "metrics": dice.choice(("", "", "", "protected", "unprotected")),
        "clip": wrap != "tp" and dice.random() < 0.25,
        "every": dice.choice((1, 1, 1, 1, 2, 3)) if replicated else 1,
        "scaler": dice.choice(("", "", "enabled", "disabled")) if replicated else dice.choice(("", "", "disabled")),
        "between": dice.sample(BETWEEN, dice.choice((0, 1, 1, 2, 3))),
        "between_every": dice.choice((1, 1, 2, 3)),
        "head": dice.random() < 0.1,  # actions between steps come before the step, not after it
    }
    if wrap == "ddp":
        loop["ddp"] = dice.choice(({}, {}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}))
        loop["bucket_cap_mb"] = dice.choice((0.001, 0.01, 25))
        loop["no_sync"] = dice.random() < 0.5
        loop["zero_redundancy"] = len(loop["optimizers"]) == 1 and not loop["scaler"] and dice.random() < 0.1
    if loop["every"] > 1:
        loop["zero"], loop["micro"] = "after", 1
    if dice.random() < 0.15:
        _break(dice, loop, ranks)
    return loop


def _carried(dice: random.Random, loop: dict[str, Any]) -> dict[str, Any]:
    if loop.get("breach"):
        return {}
    return {
        "carries": dice.sample(CARRIERS, dice.choice((0, 0, 1, 2))),
        "carries_from": dice.choice((0, 2, 4)),
        "rolls_back": loop["wrap"] in ("ddp", "plain") and not loop.get("zero_redundancy") and dice.random() < 0.2,
    }


def _block(dice: random.Random, *, whole: bool) -> str:
    return dice.choice(("plain", "plain", "dropout", "norm", "checkpointed") if whole else ("plain",))


def _break(dice: random.Random, loop: dict[str, Any], _ranks: int) -> None:
    """Make the loop break a rule, and choose parts with which that has an effect."""
    breach = dice.choice(list(BREACHES))
    loop["breach"] = breach
    match breach:
        case "unprotected-optimizer":
            loop["optimizers"][0] = dice.choice(("momentum", "adam"))
        case "unprotected-second":
            loop["optimizers"] = ["adam", "momentum"]
        case "unprotected-scheduler":
            loop["scheduler"] = loop["scheduler"] or "step"
        case "unprotected-average" if loop["wrap"] == "ddp":  # a module: no other average can be found
            loop["average"] = loop["average"] or "between"
        case "unprotected-average":
            loop["breach"] = "carried-average"
        case "carried-batch":
            loop["data"] = dice.choice(("keyed", "global"))
        case "iterator":
            loop["data"] = "iterator"
        case "stepped-in-backward" if loop["wrap"] == "pp":  # the next microbatch needs the weights unchanged
            loop |= {"breach": "data-write", "every": 1}
        case "stepped-in-backward":
            loop |= {"scaler": "", "micro": 1, "every": 1, "clip": False, "scheduler": "", "optimizers": ["momentum"]}
            loop["zero_redundancy"] = False
        case "data-write" | "late-collective":
            loop["every"] = 1


# --- faults ----------------------------------------------------------------------------------------------------------


def _faults(dice: random.Random, ranks: int, steps: int) -> tuple[tuple[str, ...], tuple[Strike, ...]]:
    deaths: list[str] = []
    strikes: list[Strike] = []
    for number in range(dice.choice((1, 2, 2, 3, 3, 4))):
        if dice.random() < 0.25:
            strikes.append(_strike(dice, ranks, steps, number))
        else:
            deaths.append(_death(dice, ranks, steps, deaths))
    return tuple(deaths), tuple(strikes)


def _uncaught(death: str) -> str:
    """Replace an exception that the script would catch: only an optimizer's hook would notice it."""
    hidden = any(f"at={place}," in death for place in ("forward", "backward", "issue", "collective"))
    return death.replace("how=raise-once", "how=sigkill") if hidden else death


def _death(dice: random.Random, ranks: int, steps: int, before: list[str]) -> str:
    """Return a fault in the script. Only one per job raises: the same exception twice counts as a bug of the script."""
    place = _weighted(dice, PLACES)
    how = _weighted(dice, KINDS)
    rank = dice.randrange(ranks)
    if place == "rehearsal" and before:  # a rehearsal follows an earlier death of the rank
        rank = int(before[-1].partition(",")[0].removeprefix("rank="))
    elif place == "rehearsal":
        place = "collective"
    if how == "raise-once" and ("raise-once" in f"{before}" or place in ("capture", "end")):
        how = "sigkill"
    if how == "sigstop" and place in ("setup", "rehearsal", "end"):
        how = "abort"  # only the loop is checked for hangs
    parts = [f"rank={rank}", f"at={place}", f"how={how}"]
    if place not in ("setup", "rehearsal", "end"):
        first = 0 if dice.random() < 0.1 else 2
        parts.append(f"step={dice.randrange(first, steps)}")
    if place in COUNTS:
        parts.append(f"n={dice.choice((0, 0, 1, dice.randrange(COUNTS[place])))}")
    if how not in ("raise-once", "sigstop") and place in ("collective", "after", "between") and dice.random() < 0.4:
        parts.append(f"us={dice.choice((50, 500, 2000, 10000))}")
    return ",".join(parts)


def _strike(dice: random.Random, ranks: int, steps: int, number: int) -> Strike:
    target = "newest" if dice.random() < 0.3 else f"rank {dice.randrange(ranks)}"
    how = _weighted(dice, SIGNALS)
    if target == "newest" and how == "SIGSTOP":
        how = "SIGKILL"  # it may be a spare that takes a rank in set-up, where hangs are not checked
    ms = int(10 ** dice.uniform(0, 2.5))
    if number and dice.random() < 0.5:
        return Strike(target, how, after_death=number - 1, ms=ms)
    return Strike(target, how, after_version=dice.randrange(1, steps), ms=ms)
