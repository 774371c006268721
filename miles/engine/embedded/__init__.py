"""The engine inside the rollout process, on plain PyTorch."""
