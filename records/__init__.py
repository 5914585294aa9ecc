"""A tool of the repository: compares the records of its runs with the papers' figures (`python -m records`)."""
