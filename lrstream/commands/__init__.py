"""One use case per subcommand of the command line: returns a report, prints nothing."""
