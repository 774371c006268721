"""Generate the reference pages of docs/ from the flags, the objectives and the tables of launch scripts."""
