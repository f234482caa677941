"""Which trial goes next: slots, their order and what holds them back. Pure: no I/O, and the clock is passed in."""
