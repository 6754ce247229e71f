"""The command line: parses arguments, calls one use case of `lrstream.commands`, renders its report.

Only Typer is imported when the program starts; everything else waits for the command that needs it.
"""
