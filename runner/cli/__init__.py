"""The command line: words and environment variables in, frozen settings out.

Nothing else in the process reads flags or variables. `app` calls `parse_command` once, at the start (`__main__` calls
`parse_ollama`). All other code takes the settings. `runner/settings.py` holds the flags, each beside its field. Read in
this order:

    commands.py    the table of commands, with their texts, their argparse parsers and scripts for shells
    parse.py       the text of every flag: from the command line, else its variable, else its default; then one
                   function for each command, which returns its settings
    convert.py     the text of a flag converted into the field's type, or refused with a UsageError
"""
