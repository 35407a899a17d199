"""The command line: click, answers and exit codes."""
