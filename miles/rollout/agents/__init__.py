"""Programs that act as agents: an OpenAI-compatible server that records their calls token-exactly."""
