"""What is not about depth: checks of what users give, and the terminal."""
