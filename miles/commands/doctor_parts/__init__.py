"""What this machine can run: packages, devices, limits and leftovers. Imports neither torch nor Ray in this process."""
