"""The model, without any parallelism: Llama, its config, its weights and its FLOPs."""
