"""Checkpoints: Hugging Face model folders that any layout writes and reads."""
