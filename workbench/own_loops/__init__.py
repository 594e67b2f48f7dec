"""Training loops of your own: batches, losses and set-up, in every layout."""
