"""Who may ask, and how much: API keys, tenants and their limits.

`keyfile` is the file of keys as `jaxserve keys` writes it, `keyring` what a worker knows of it,
`gate` closes the routes, `rates` and `budget` count what each tenant uses, across all workers.
"""
