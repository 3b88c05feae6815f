"""Steps 1 and 9 as Anthropic's Messages API has them; in between everything goes OpenAI's way.

`schema` says what a body may hold, `read` turns it into a chat, `answer` writes what goes back,
`errors` the error object; `routes` joins them.
"""
