"""What every run needs, whatever it trains: command line, ranks, record, snapshots, guards."""
