"""A process's part in the cluster: its heartbeat, the versions it holds, the users it erases; and the switchboard."""
