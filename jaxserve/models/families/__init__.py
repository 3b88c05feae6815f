"""What differs between families: how their configuration is read and their tensors are called."""
