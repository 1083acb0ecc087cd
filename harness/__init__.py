"""The shared infrastructure of all runs: command line, ranks, logs, snapshots, NaN checks."""
