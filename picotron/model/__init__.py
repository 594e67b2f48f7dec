"""The model, without any parallelism: Llama and its families, its loss, its weights and its FLOPs."""
