"""The front door over ZeroMQ."""
