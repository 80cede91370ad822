"""The cache of answers and states: policies of eviction, the tiers, what is admitted, refreshed and forgotten."""
