"""x"""
recompute = lora = None
