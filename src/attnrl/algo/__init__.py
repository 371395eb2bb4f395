"""The paper as small pure functions: standard library and numpy, no I/O, no clock, no global random state."""
