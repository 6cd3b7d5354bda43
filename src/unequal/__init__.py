"""unequal: embedding rows are not equal."""
