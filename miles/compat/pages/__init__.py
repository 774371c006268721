"""Make the reference pages of the built docs from the flags, the objectives and the tables of launch scripts."""
