"""Hostile agents as fixtures: `agents/` holds the attacks, `catalog.py` says what must become of each."""
