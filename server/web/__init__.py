"""The web page: a playground, the waterfall of a request, and a live view of the engine.

Plain files without a build step; everything they show comes from the server's own routes.
"""
