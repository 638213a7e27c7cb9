"""Records of verdicts, and how they read: on a terminal, as a page, as JUnit XML."""
