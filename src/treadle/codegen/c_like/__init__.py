"""What printers of C-like languages share: lines, values, statements, tiles."""
