"""Generation servers: the parts of their engine that do not depend on the program that they run."""
