"""What a call costs, measured beside other systems."""
