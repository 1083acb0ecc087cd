"""x"""
tensor_parallel = sequence_parallel = pipeline = ring = experts = None
