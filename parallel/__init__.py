"""Parallelism that several scripts share: meshes, pipelines, attention over shards, Local SGD."""
