"""The command line: words and environment variables in, frozen settings out.

Nothing else in the process reads flags or variables. `app` calls `parse_command` once, at the start (`__main__` calls
`parse_ollama`); all other code takes the settings (`runner/settings.py`). Read in this order:

    flag.py        the type of a flag, and of a command
    flags.py       the table of flags; `--help` and the documentation are made from it
    commands.py    the table of commands
    parser.py      one argparse parser for the server and one for each command
    convert.py     the text of a flag converted into numbers, sizes, paths and addresses, or refused with a UsageError
    parse.py       the text of every flag: from the command line, else its variable, else its default; then one
                   function for each command, which returns its settings
    completion.py  scripts for shells, written by shtab from the same parsers
"""
