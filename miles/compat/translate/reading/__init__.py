"""Read files of settings. Nothing in them is run, and variables of the environment are not read."""
