"""Generate inside the rollout process, with plain PyTorch."""
