"""What the result of a function of an implementation depends on, found from source and values."""
