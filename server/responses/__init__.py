"""Steps 1 and 9 as OpenAI's Responses API has them; in between everything goes the chat's way.

`schema` says what a body may hold, `read` turns it into a chat, `answer` writes what goes back,
`store` keeps what a later request may build on; `routes` joins them.
"""
