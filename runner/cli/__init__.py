"""The command line: turns words and environment variables into frozen settings.

No other code of the process reads flags or their variables. `app` calls `parse_command` once, at the start (`__main__`
calls `parse_ollama`). All other code gets the settings. `runner/settings.py` defines each flag beside its field. Read
in this order:

    commands.py    the table of commands, with their help texts; parsers and shell completions made from the table
    parse.py       finds the text of every flag: on the command line, else in the flag's variable, else the default;
                   has one function for each command, which returns the command's settings
    convert.py     converts the text of a flag into the field's type, or raises a UsageError
"""
