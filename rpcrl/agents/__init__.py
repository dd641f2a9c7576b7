"""How do samples come about that are more than one answer? Loops of a user's own, between the model and its tools."""
