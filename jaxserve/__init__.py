"""jaxserve: an inference runtime in JAX, from prompt to token."""
