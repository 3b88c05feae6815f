"""What requests took and cost: measured while they are answered, kept in a ledger, summed up.

`meter` follows one HTTP request to its last answer's end, `ledger` writes it down off the request's
path, `summary` adds up, for `/v1/usage` and for `jaxserve usage`.
"""
