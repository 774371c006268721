"""What every room may use: text, errors, flags, secrets, user code, processes, storage, this host."""
