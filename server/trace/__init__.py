"""From prompt to token, as it went for one request: `timeline` makes a trace, `chrome` draws it.

Traces lie in the ledger's file, so that any worker finds what another one has answered.
"""
