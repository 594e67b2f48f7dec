"""Other algorithms for what picotron/ does. `choose` is the table from which a config selects."""
