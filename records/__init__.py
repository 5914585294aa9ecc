"""A tool of the repository: what the records of its runs say of the papers' figures (`python -m records`)."""
