"""Which processes live, what they hold, follow and erase. Pure decisions: time is passed in."""
