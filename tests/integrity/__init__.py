"""Attacks on the grading phase, and what a grade is."""
