"""Helpers that are independent of depth mixing: files, checks of user input, the terminal."""
