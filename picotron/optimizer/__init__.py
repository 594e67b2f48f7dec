"""AdamW on float32 master weights: the update, its learning rate, and states in bfloat16."""
