"""Storage by URL: inputs that are downloaded, and the copy of a run."""
