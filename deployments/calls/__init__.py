"""Calls from a gateway to other processes: one by one, or together."""
