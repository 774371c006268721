"""Settings in files: what --config and --custom-config-path read, and the run.yaml and saved settings of a run."""
