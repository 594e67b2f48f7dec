"""Text becomes token files: documents, samples and conversations, tokenised once and cached."""
