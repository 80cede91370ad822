"""The work itself, without Ray: recommend, train, evaluate, compile."""
