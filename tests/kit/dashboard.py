"""The queries of the Grafana dashboard in the docs, checked against a page of metrics."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "deadpool-run.json"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds to each sample."""
_WORD = re.compile(r"([a-z_]\w*)\s*(\{[^}]*\})?")
_LABELS = re.compile(r"\b(?:on|by|without|ignoring|group_left)\s*\(([^)]*)\)")
_LANGUAGE = {"on", "by", "group_left", "increase", "rate", "histogram_quantile", "topk", "m", "h"}


def queries() -> list[tuple[str, str, str]]:
    """Return title, query and legend of each query of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [(panel["title"], panel.get("targets", ())) for panel in dashboard["panels"]]
    found = [(title, each["expr"], each.get("legendFormat", "")) for title, targets in asked for each in targets]
    notes = [(each["name"], each["expr"], "") for each in dashboard["annotations"]["list"]]
    variables = [
        (
            each["label"],
            "{}{{{}=~'.+'}}".format(*re.fullmatch(r"label_values\((\w+), (\w+)\)", each["definition"]).groups()),
            "",
        )
        for each in dashboard["templating"]["list"]
        if each["type"] == "query"
    ]
    return [*found, *notes, *variables]


def check_dashboard(metrics: str) -> int:
    """Assert that the page has every metric and label that the dashboard asks for; return the number of queries."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    checked = queries()
    for title, query, legend in checked:
        lists = [label.strip() for text in _LABELS.findall(query) for label in text.split(",")]
        words = _WORD.findall(_LABELS.sub(" ", query))
        names = [(name, matchers) for name, matchers in words if name not in _LANGUAGE]
        assert names, query
        for name, matchers in names:
            assert name in labels, f"{title}: there is no metric {name}"
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
                assert label in labels[name], f"{title}: {name} has no label {label}"
        known = SCRAPED.union(*(labels[name] for name, _ in names))
        for label in (*lists, *re.findall(r"\{\{(\w+)\}\}", legend)):
            assert label in known, f"{title}: no metric of the query has the label {label}"
    return len(checked)
