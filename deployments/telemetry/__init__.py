"""What the cluster tells of itself: metrics, logs, GPUs, alerts."""
