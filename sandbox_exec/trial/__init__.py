"""One trial: its supervisor, and the reader of what its agent traced."""
