"""Generate with SGLang servers: start them, send them requests and weights, check their health, replace them."""
