"""Functions of the user that see the groups and samples of an iteration."""
