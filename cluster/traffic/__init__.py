"""Requests on their way: which start, where one goes, how long it may take, when it is tried again. Pure decisions: time is passed in."""
