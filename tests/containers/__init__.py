"""Tests on a real Docker engine. The folder cannot be called `docker`: that is the name of the SDK."""
