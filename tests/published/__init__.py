"""Published models, shortened, with their real field names and oddities, and what each should be.

`*.toml` has two tables for each. `form.py` explains the fields and writes a model's directory, `measure.py` finds out
what the opened model does, and `test_published.py` compares.
"""
