"""What is not about depth: files, checks of what users give, the terminal."""
