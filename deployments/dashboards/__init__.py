"""Grafana's dashboards and Prometheus' alert rules, over the metrics that cluster.metrics declares."""
