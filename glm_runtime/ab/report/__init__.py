"""What a comparison looks like: a table, a page, and files for other tools."""
