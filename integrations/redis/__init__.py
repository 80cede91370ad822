"""Redis as the shared cache: for clusters that have one, and for caches that outlive the Ray cluster."""
