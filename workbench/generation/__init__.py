"""Generation of text in any layout."""
