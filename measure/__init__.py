"""Programs that produce evidence: the files in results/."""
