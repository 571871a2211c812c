"""Published models in our own short writing, with their real field names and oddities, and what each should be.

`*.toml` holds them, a table for each; `form.py` says what the fields of one mean and writes its directory, `measure.py`
finds out what the opened model does, and `test_published.py` compares.
"""
