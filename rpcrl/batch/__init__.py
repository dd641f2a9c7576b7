"""What is a batch? Columns over rows, as a value."""
