"""Requests on their way: who may start, where one goes, how long it may take, when it is tried again. Pure decisions: time is passed in."""
