"""What ``python -m matrix`` knows of the repository that it runs in: its configuration, how cells get there, and how
their environments are made."""
