"""Backends under care: probed, loaded, asked in order, measured, stopped when they break."""
