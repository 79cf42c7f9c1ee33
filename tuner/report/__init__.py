"""A run as one page: a self-contained HTML file that says and shows what was found."""
