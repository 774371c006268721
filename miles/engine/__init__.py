"""Generation engines: the protocol, the table of engines, and the engines themselves."""
