"""Pictures in the engine: from the markers of a prompt to features in a forward.

`support` and `expand` work off the engine thread: what a model makes of pictures, and a prompt with them. `encoder` and
`progress` belong to the engine thread: the tower and the features it has made, and how far one request's pictures are.
"""
