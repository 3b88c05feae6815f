"""Step 1 of the walk: messages, tools and documents become a prompt's text and its token ids.

`chat_template.ChatTemplate` runs the model's own Jinja template in a sandbox; `assemble` turns
a chat or a completion request into prompt ids. Nothing here knows jax, the engine, or HTTP.
"""
