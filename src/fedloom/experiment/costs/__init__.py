"""What a recipe costs, and what machines can carry, before it is spent."""
