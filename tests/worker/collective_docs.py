"""The tables of docs/collectives.md, made from what both backends gave."""

import collective_matrix as cases

INTENDED = {
    ("errors", "a group that was destroyed"): "Gloo still communicates: its connections live as long as anybody "
    "refers to the group. Ours are freed when the group is destroyed, as nothing would rebuild them after a loss.",
}
"""Every case whose outcome differs, and why it is meant to."""

BEGIN, END = "<!-- made by tests/worker/groups/test_collectives_differential.py -->", "<!-- end -->"


def put_tables(page, gloo, deadpool, gloo_matrix, deadpool_matrix):
    """Return the page with new tables."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    parts = [
        _matrix(gloo_matrix, deadpool_matrix),
        _reductions(gloo_matrix, deadpool_matrix),
        _named(gloo, deadpool),
        "### Intended differences\n\n" + "\n".join(f"* **{name}**: {why}" for (_, name), why in INTENDED.items()),
    ]
    return f"{head}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{tail}"


def _rank_entry(gloo, deadpool, keys):
    """Say of cases that belong together whether both backends gave the same: values, errors, or some of both."""
    if any(gloo[key] != deadpool[key] for key in keys):
        return "differs"
    kinds = {gloo[key][0] for key in keys}
    return {"gives": "=", "raises": "E"}[kinds.pop()] if len(kinds) == 1 else "= E"


def _table(heading, columns, rows):
    lines = [heading, "", "| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | " + " | ".join(row) + " |" for name, row in rows])


DTYPES = [str(dtype).removeprefix("torch.") for dtype in cases.DTYPES]


def _matrix(gloo, deadpool):
    rows = []
    for name in cases.MATRIX:
        keys = {dtype: [k for k in gloo if k[:2] == (name, dtype) and len(k) == 4] for dtype in DTYPES}
        rows.append((f"`{name}`", [_rank_entry(gloo, deadpool, keys[dtype]) for dtype in DTYPES]))
    return _table("### Collective and dtype", DTYPES, rows)


def _reductions(gloo, deadpool):
    rows = []
    for op in cases.REDUCTIONS:
        keys = {dtype: [k for k in gloo if k[:2] == (op, dtype) and len(k) == 3] for dtype in DTYPES}
        rows.append((f"`{op}`", [_rank_entry(gloo, deadpool, keys[dtype]) for dtype in DTYPES]))
    return _table("### Reduction and dtype", DTYPES, rows)


def _named(gloo, deadpool):
    lines = ["### Cases", "", "| | case | both give |", "| --- | --- | --- |"]
    section = None
    for key, outcome in gloo.items():
        shown = "" if key[0] == section else key[0]
        section = key[0]
        lines.append(f"| {shown} | {key[1]} | {_told(outcome) if outcome == deadpool[key] else 'see below'} |")
    return "\n".join(lines)


def _told(outcome):
    if outcome[0] == "gives":
        return "the same values" if outcome[1] is not None else "nothing, as it should"
    text = " ".join(outcome[2].split()).replace("|", "\\|")
    return f"`{outcome[1]}`: {text if len(text) <= 90 else text[:87] + '...'}"
