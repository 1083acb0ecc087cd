"""Judges the answers of exercises/: runs them on forked ranks, and says what is wrong with them."""
