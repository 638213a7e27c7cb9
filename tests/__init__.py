"""A package, so that it is found before the ``tests`` that the wheels of old versions of trl bring along."""
