"""Write the dashboards and the alert rules: `python -m deployments.dashboards.build`."""

import json
from pathlib import Path
from typing import Any

import yaml

from deployments.dashboards.alerts import ALERTS, Alert
from deployments.dashboards.boards import BOARDS, Board, Panel

HERE = Path(__file__).parent
WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}


def files() -> dict[str, str]:
    """File name -> content."""
    boards = {f"{name}.json": json.dumps(dashboard(board), indent=2) + "\n" for name, board in BOARDS.items()}
    rules = {"groups": [{"name": "genrec", "rules": [_rule(alert) for alert in ALERTS]}]}
    return {**boards, "alerts.yaml": yaml.safe_dump(rules, sort_keys=False, width=160)}


def dashboard(board: Board) -> dict[str, Any]:
    """A board as Grafana imports it; the data source is chosen on import."""
    panels: list[dict[str, Any]] = []
    for line, (title, row) in enumerate(board.rows.items()):
        top = line * (HEIGHT + 1)
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _at(0, top, WIDTH, 1)}
        )
        width = WIDTH // len(row)
        panels += [_panel(one, len(panels) + 1 + place, _at(place * width, top + 1, width, HEIGHT)) for place, one in enumerate(row)]
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["genrec"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        for index, (legend, expr) in enumerate(panel.queries.items())
    ]
    defaults = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.cure},
    }


def main() -> None:
    for name, text in files().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
